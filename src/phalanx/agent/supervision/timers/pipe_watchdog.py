"""The watchdog of an agent: a timer server whose requests come through a named pipe.

Invariants
- Scopes expire independently: if the worker survives the signal it chose, its other scopes stay armed.
- Facts about the worker are read before the signal and logged after it, because a killed process has none and
  a slow log must not delay the signal. `log_event` is called before the signal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import inf
from signal import SIGKILL

from phalanx.agent.supervision.timers.timer_pipe import FileTimerRequest, NamedPipe
from phalanx.agent.supervision.timers.watchdog import Watchdog, log
from phalanx.kernel import read_text

_HOOKED = ("phalanx.elastic.timer.debug_info_logging", "phalanx.elastic.timer.file_based_local_timer")
"""Where programs put a function of their own in place of `log_debug_info_for_expired_timers`."""


class PipeWatchdog(Watchdog):
    """Stops workers that do not leave a scope in time, with the signal they chose."""

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = inf,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        self._named_pipe = NamedPipe(file_path)
        super().__init__(self._named_pipe, max_interval, daemon)
        self._run_id = run_id
        self._log_event = log_event

    def start(self) -> None:
        """Make the pipe and serve it in a thread, if none does."""
        if self._thread is None:
            super().start()
            self._event("watchdog started", None)

    def stop(self) -> None:
        """Stop serving and remove the pipe."""
        if self._named_pipe.named is not None:
            self._named_pipe.remove()
            super().stop()
            self._event("watchdog stopped", None)

    def _reap_worker(self, worker_pid: int, signal: int = SIGKILL) -> bool:
        """Signal the worker if it is still the process that sent the request; True if signalled or gone."""
        return self._signal(worker_pid, signal)

    def _reap(self, worker_id: int, expired: list[FileTimerRequest]) -> bool:
        scopes = [request.scope_id for request in expired]
        _call_hooks(self._run_id, {worker_id: scopes})
        for request in expired:
            self._event("timer expired", request)
        facts = _process_facts(worker_id)
        # Two scopes may want different signals: each is sent once, in the order of expiry.
        for wanted in dict.fromkeys(request.signal for request in expired):
            if wanted and self._reap_worker(worker_id, wanted):
                first = next(request for request in expired if request.signal == wanted)
                self._event("kill worker process", first)
        _log_expired(self._run_id, worker_id, scopes, facts)
        return True

    def _event(self, name: str, request: FileTimerRequest | None) -> None:
        try:
            if self._log_event is not None:
                self._log_event(name, request)
        except Exception as error:  # noqa: BLE001 - an error of the callback must not end the watchdog
            log("error", f"timers: log_event({name!r}): {type(error).__name__}: {error}")


def _call_hooks(run_id: str, expired: dict[int, list[str]]) -> None:
    """Call what replaces `log_debug_info_for_expired_timers`, while the worker can still be looked at."""
    ours = log_debug_info_for_expired_timers
    for module in _HOOKED:
        hook = getattr(sys.modules.get(module), ours.__name__, ours)
        try:
            if hook is not ours:
                hook(run_id, expired)
        except Exception as error:  # noqa: BLE001 - an error of the hook must not end the watchdog
            log("error", f"timers: {module}: {type(error).__name__}: {error}")


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log for each worker the scopes that it did not leave in time, and what it is doing."""
    for pid, scopes in expired_timers.items():
        _log_expired(run_id, pid, scopes, _process_facts(pid))


def _log_expired(run_id: str, pid: int, scopes: list[str], facts: str) -> None:
    names = ", ".join(map(repr, scopes))
    log("warning", f"timers: run {run_id}: pid {pid} did not leave {names} in time; {facts}")


def _process_facts(pid: int) -> str:
    """State, threads, memory and command of a process."""
    lines = [line.split(":\t", 1) for line in read_text(f"/proc/{pid}/status").splitlines() if ":\t" in line]
    status = {name: value.strip() for name, value in lines}
    if not status:
        return "gone"
    command = read_text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:200] or status.get("Name", "?")
    state, threads, memory = (status.get(name, "?") for name in ("State", "Threads", "VmRSS"))
    where = read_text(f"/proc/{pid}/wchan").strip("0 \n")
    waiting = f", waiting in {where}" if where else ""
    return f"state {state}, {threads} threads, memory {memory}{waiting}; command: {command}"
