"""What the workers of this node use of its NVIDIA devices, read by a process of its own (observe/gpus.py).

NVML's first call may take seconds and its pages stay, so an agent never loads it. A process reads it when
somebody asks, at most every few seconds; a node without such a device starts none. One that takes long is not
waited for: the question is answered with the last figures. One that hangs is killed.
"""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.core.group.group import Phase
from phalanx.job.time_budgets import DEVICES

TYPE_CHECKING = False
if TYPE_CHECKING:
    Figures = dict[int, list[dict[str, Any]]]

DEVICE = "/dev/nvidiactl"
_FRESH = 5.0  # seconds for which figures serve
_HUNG = 20.0  # seconds after which the process is killed
_LONGEST = 1 << 20


class GpuProbe:
    """One agent's; a part of its loop. `ask(now, then)` calls `then` with the figures of each process."""

    def __init__(self, device: str = DEVICE, command: Sequence[str] | None = None) -> None:
        self._device, self._command = device, command
        self._figures: Figures = {}
        self._read_at = float("-inf")
        self._waiting: list[tuple[float, Callable[[Figures], None]]] = []  # until when, and whom to tell
        self._process: subprocess.Popen[bytes] | None = None
        self._exit = -1  # readable when the process has ended
        self._output = bytearray()
        self._kill_at = 0.0

    def ask(self, now: float, then: Callable[[Figures], None]) -> None:
        """Tell the figures, at once if they are new or there is no device."""
        if self._process is None and now < self._read_at + _FRESH:
            then(self._figures)
        elif self._process is not None or (os.path.exists(self._device) and self._begin(now)):
            self._waiting.append((now + DEVICES, then))
        else:
            then({})

    def _begin(self, now: float) -> bool:
        import sys

        from phalanx.observe import __path__ as place

        command = self._command or [sys.executable, "-I", "-S", os.path.join(place[0], "gpus.py")]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return False
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._process, self._exit = process, os.pidfd_open(process.pid)
        self._output.clear()
        self._kill_at = now + _HUNG
        return True

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        if self._process is None or self._process.stdout is None:
            return []
        found = [(self._exit, select.POLLIN)]
        if not self._process.stdout.closed:
            found.append((self._process.stdout.fileno(), select.POLLIN))
        return found

    def deadline(self, phase: Phase) -> float | None:
        times = [until for until, _ in self._waiting]
        return min([*times, self._kill_at]) if self._process is not None else None

    def look(self, phase: Phase, now: float) -> None:
        if self._process is None:
            return
        self._read()
        if select.select([self._exit], [], [], 0)[0]:
            self._end(now)
        elif now >= self._kill_at:
            self._kill_at = float("inf")  # it cannot be killed while it waits for the driver
            self._process.kill()
        due = [then for until, then in self._waiting if now >= until or self._process is None]
        self._waiting = [one for one in self._waiting if one[1] not in due]
        for then in due:
            then(self._figures)

    def _read(self) -> None:
        assert self._process is not None
        stream = self._process.stdout
        if stream is None or stream.closed:
            return
        try:
            while more := os.read(stream.fileno(), 1 << 16):
                self._output += more
                if len(self._output) > _LONGEST:
                    self._process.kill()
                    break
            stream.close()  # its end, or too much of it
        except BlockingIOError:
            pass

    def _end(self, now: float) -> None:
        assert self._process is not None
        self._read()
        if self._process.stdout is not None:
            self._process.stdout.close()
        code = self._process.wait()
        os.close(self._exit)
        self._process, self._exit, self._read_at = None, -1, now
        self._figures = _decode(bytes(self._output)) if code == 0 else {}

    def close(self) -> None:
        """End what runs."""
        if self._process is not None:
            self._process.kill()
            self._waiting.clear()
            if select.select([self._exit], [], [], 1.0)[0]:
                self._end(0.0)


def _decode(data: bytes) -> Figures:
    import json

    try:
        found = json.loads(data)
        return {int(pid): list(devices)[:16] for pid, devices in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
