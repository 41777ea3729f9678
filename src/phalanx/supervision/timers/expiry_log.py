"""What is known about a worker at the moment its time is up: read before it is signalled, said afterwards.

Reading comes first because a killed process tells nothing; saying comes last because a slow log must not
make the signal late.
"""

from __future__ import annotations

import os

from phalanx.supervision.timers.watchdog import say


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Says for each worker which scopes it did not leave in time, and what it is doing."""
    tell(run_id, expired_timers, {pid: facts(pid) for pid in expired_timers})


def facts(pid: int) -> str:
    """Name, state, command and threads of a process, as far as the system tells."""
    lines = [line.split(":\t", 1) for line in _text(f"/proc/{pid}/status").splitlines() if ":\t" in line]
    status = {name: value.strip() for name, value in lines}
    if not status:
        return "gone"
    command = " ".join(_text(f"/proc/{pid}/cmdline").split("\0")).strip()
    waiting = _text(f"/proc/{pid}/wchan").strip()
    known = [
        f"state {status.get('State', '?')}",
        f"{status.get('Threads', '?')} threads",
        f"memory {status.get('VmRSS', '?')}",
    ]
    if waiting not in ("", "0"):
        known.append(f"waiting in {waiting}")
    return f"{', '.join(known)}; command: {command[:200] or status.get('Name', '?')}"


def tell(run_id: str, expired: dict[int, list[str]], known: dict[int, str]) -> None:
    """One line per worker."""
    for pid, scopes in expired.items():
        names = ", ".join(repr(scope) for scope in scopes)
        say("warning", f"timers: run {run_id}: pid {pid} did not leave {names} in time; {known[pid]}")


def _text(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 14).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
