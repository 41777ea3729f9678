"""torch.distributed.elastic.timer.file_based_local_timer's names: timers over a named pipe.

Invariants of the client
- A writer waits for room in the pipe, but not forever. It reconnects to a restarted server. Its descriptor
  keeps its number when the pipe is opened again, so that another thread never writes into an unrelated file.
- A release without a server is complete: a server that is gone keeps no timers.
"""

from __future__ import annotations

import os
import time
from errno import ENOENT, ENXIO, EPIPE
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from phalanx.agent.supervision.timers.pipe_watchdog import PipeWatchdog
from phalanx.agent.supervision.timers.pipe_watchdog import (
    log_debug_info_for_expired_timers as log_debug_info_for_expired_timers,
)
from phalanx.agent.supervision.timers.timer_pipe import (
    RELEASE,
    FileTimerRequest,
    encode_line,
    open_pipe,
    write_message,
)
from phalanx.agent.supervision.timers.watched_processes import identity
from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.timer.api import TimerClient

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

WRITE_TIMEOUT = 5.0
"""Seconds a worker waits for room in the pipe: a server that has not read for this long is stuck."""
SERVER_TIMEOUT = 1.0
"""Seconds a worker waits for a server to open the pipe."""


class FileTimerClient(TimerClient):
    """Sends the requests of this process through a named pipe; `signal` is sent to it on expiry."""

    _fd: int  # set when the pipe is first opened, then never changed

    def __init__(self, file_path: str, signal: Any = SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal
        self._held: set[str] = set()
        identity()

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See `TimerClient.acquire`; BrokenPipeError if there is no server."""
        self._held.add(scope_id)
        self._send(scope_id, expiration_time, SERVER_TIMEOUT)

    def release(self, scope_id: str) -> None:
        """See `TimerClient.release`."""
        try:
            self._send(scope_id, RELEASE, 0.0)
        except BrokenPipeError:
            pass
        self._held.discard(scope_id)

    def __getstate__(self) -> dict[str, Any]:
        return {"_file_path": self._file_path, "signal": self.signal, "_held": set()}

    def __del__(self) -> None:
        fd = self.__dict__.get("_fd")
        if fd is not None and not self._held:  # the open pipe shows the server that this process asked
            os.close(fd)

    def _send(self, scope: str, expiration_time: float, server_timeout: float) -> None:
        signal = 0 if expiration_time < 0 else int(self.signal)
        pid, started = identity()
        line = encode_line(FileTimerRequest(pid, scope, expiration_time, signal), started)
        fd: int | None = self.__dict__.get("_fd")
        if fd is None:
            fd = self._reopen(server_timeout)
        try:
            written = write_message(fd, line, WRITE_TIMEOUT)
        except BrokenPipeError:
            written = write_message(self._reopen(server_timeout), line, WRITE_TIMEOUT)
        if not written:
            raise TimeoutError(
                f"timer {scope!r}: the server has not read {self._file_path} for {WRITE_TIMEOUT:g} s;"
                " is it stuck?"
            )

    def _reopen(self, server_timeout: float) -> int:
        """Open the pipe, under the old descriptor number if there is one; waits briefly for a server."""
        end, pause = time.monotonic() + server_timeout, 0.001
        while True:
            try:
                fd = open_pipe(self._file_path, os.O_WRONLY)
                break
            except OSError as error:
                if error.errno not in (ENXIO, ENOENT):
                    raise
                if time.monotonic() >= end:
                    raise BrokenPipeError(
                        EPIPE,
                        "no timer server reads the pipe; is the agent's watchdog running?",
                        self._file_path,
                    ) from None
            time.sleep(pause)  # back-off: there is no event for a reader that opens a pipe
            pause = min(pause * 2, 0.05)
        # Atomic, because another thread may open it at the same time.
        number = self.__dict__.setdefault("_fd", fd)
        if number != fd:
            os.dup2(fd, number, inheritable=False)
            os.close(fd)
        return int(number)


class FileTimerServer(PipeWatchdog):
    """Stops workers that do not leave a scope in time, with the signal they chose."""

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        super().__init__(file_path, run_id, max_interval, daemon, log_event)

    def run_once(self) -> None:
        """Handle what has arrived, in the caller's thread, without waiting."""
        if self._thread is None:
            self._run_watchdog(0)

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is such a process (a zombie counts: it still has the pid)."""
        try:
            os.kill(pid, 0)
        except PermissionError:
            pass
        except (OSError, OverflowError):
            return False
        return pid > 0

    def get_last_progress_time(self) -> int:
        """Wall time of the last round; now, while the server sleeps as planned."""
        return int(self.last_progress())


__getattr__ = found_in(__name__)
