"""What NCCL itself knows of a job that hangs: a further witness, beside stacks and recorded collectives.

NCCL 2.24 and later answers questions on a port of the loopback interface, in a thread of one process on each
node; these threads know of each other, so one answer is about the whole job. It is kept beside the logs, and
what NCCL calls errors and warnings is part of the report. It never decides: its text varies with the version.

Only a worker of this job is asked. Another job on the machine may have the port, or another user's program.
"""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Iterable

from phalanx import kernel
from phalanx.job import environment

DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Without any of them there is no GPU, hence no NCCL."""
_DEFAULT = "localhost:28028"
_REQUEST = (
    b"timeout 1\nverbose status\n"  # how long NCCL waits for processes that do not answer it, in seconds
)
_TIMEOUT = 3.0
_MAX_BYTES = 1 << 20
_MAX_LINES = 12
_MAX_TEXT = 200
_LISTENS = "0A"
_HEADINGS = ("Errors", "Warnings")


class RasQuery:
    """One question, asked in a thread; the answer is written to `path`, if there is one."""

    def __init__(self, pids: Iterable[int], path: str) -> None:
        self.done = self.asks = False
        self.path = ""  # where the answer is, once it is there
        self.complaints: list[str] = []
        self._pids, self._path = tuple(pids), path
        if any(os.path.exists(device) for device in DEVICES):
            _thread.start_new_thread(self._run, ())
        else:
            self.done = True

    def _run(self) -> None:
        try:
            where = address(environment.nccl_ras_address())
            if where is not None and listens(where[1], self._pids):
                self.asks = True
                answer = _ask(where, time.monotonic() + _TIMEOUT)
                self.complaints = complaints(answer)
                if answer and self._path:
                    with open(self._path, "w") as file:
                        file.write(answer)
                    self.path = self._path
        except OSError:
            pass  # a process that ends, a port that is closed, a full disk: the other witnesses remain
        finally:
            self.asks, self.done = False, True


def address(text: str) -> tuple[str, int] | None:
    """Where NCCL listens, by its variable; None if that cannot be read."""
    host, _, port = (text or _DEFAULT).rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def listens(port: int, pids: Iterable[int]) -> bool:
    """Whether one of these processes listens on a port."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in kernel.read_text(f"/proc/net/{table}").splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{words[9]}]")
    return bool(sockets) and any(sockets & _files(pid) for pid in pids)


def _files(pid: int) -> set[str]:
    found = set()
    directory = f"/proc/{pid}/fd"
    try:
        for fd in os.listdir(directory):
            found.add(os.readlink(f"{directory}/{fd}"))
    except OSError:
        pass  # it has ended, or closes files
    return found


def _ask(where: tuple[str, int], until: float) -> str:
    import socket

    parts, size = [], 0
    with socket.create_connection(where, timeout=_TIMEOUT) as sock:
        sock.sendall(_REQUEST)
        while size < _MAX_BYTES and (left := until - time.monotonic()) > 0:
            sock.settimeout(left)
            try:
                data = sock.recv(1 << 16)
            except OSError:
                break  # what has come is better than nothing
            if not data:
                break
            parts.append(data)
            size += len(data)
    text = b"".join(parts).decode("utf-8", "replace").removeprefix("OK\n")  # to the first request
    return "".join(one for one in text if one.isprintable() or one == "\n")


def complaints(answer: str) -> list[str]:
    """The lines under the headings of errors and warnings; a heading is underlined."""
    lines = [line.rstrip() for line in answer.splitlines()]
    found: list[str] = []
    inside = False
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if below and not below.strip("="):
            inside = line.strip() in _HEADINGS
        elif inside and line.strip("= "):
            found.append(line.strip()[:_MAX_TEXT])
    return found[:_MAX_LINES]
