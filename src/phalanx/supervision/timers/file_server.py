"""The server behind a named pipe: the agent's watchdog for workers of any kind.

Invariants
- A signal goes only to a process that asked, that is one of ours, and that is still the same one.
- An expired scope ends alone: if its worker survives the signal it wanted, its other scopes stay armed.
- What is known about the worker is read before the signal and logged after it; `log_event` hears of the
  expiry before the signal, so that it can look at the worker while there is one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.supervision.timers import expiry_log
from phalanx.supervision.timers.fifo import Pipe
from phalanx.supervision.timers.watchdog import Watchdog, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.core.deadlines import Expired
    from phalanx.supervision.timers.requests import FileTimerRequest


class FileTimerServer:
    """Stops workers that overstay a scope, with the signal they chose.

    `max_interval` is accepted for torch's sake; the server sleeps until the next deadline whatever it is.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        self._file_path = file_path
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event
        self._pipe: Pipe | None = None
        self._garbage = 0
        self._watchdog = Watchdog()

    @property
    def dropped(self) -> dict[str, int]:
        """What was dropped, by reason."""
        counts = dict(self._watchdog.dropped)
        garbage = self._garbage + (self._pipe.garbage if self._pipe is not None else 0)
        if garbage:
            counts["garbage"] = garbage
        return counts

    @property
    def owns(self) -> Callable[[int], bool]:
        """Which pids may be watched; by default the descendants of this process. May be set."""
        return self._watchdog.workers.owns

    @owns.setter
    def owns(self, owns: Callable[[int], bool]) -> None:
        self._watchdog.workers.owns = owns

    def start(self) -> None:
        """Makes the pipe and minds it from now on, in a thread."""
        if self._watchdog.running():
            raise RuntimeError(f"the timer server of {self._file_path} is running already; stop() it first")
        self._open()
        assert self._pipe is not None
        self._watchdog.start(self._pipe, self, self._daemon)
        self._event("watchdog started", None)

    def stop(self) -> None:
        """Ends the watching and removes the pipe."""
        was_there = self._pipe is not None
        if self._pipe is not None:
            self._pipe.remove()
            self._garbage += self._pipe.garbage
        pipe, self._pipe = self._pipe, None
        self._watchdog.stop()
        if pipe is not None:
            pipe.close()
        if was_there:
            self._event("watchdog stopped", None)

    def run_once(self) -> None:
        """Handles what is there now, in the caller's thread; does not wait."""
        if self._watchdog.running():
            return
        self._open()
        assert self._pipe is not None
        self._watchdog.once(self._pipe, self)

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is such a process (a zombie counts: it still has the pid)."""
        if pid <= 0:
            return False
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            return False
        return True

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Files or drops deadlines."""
        self._watchdog.file_all((request.worker_pid, request) for request in timer_requests)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Drops all deadlines of these workers."""
        self._watchdog.forget(worker_pids)

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """By pid, the timers that expire at or before this wall time; changes nothing."""
        return self._watchdog.due_by(deadline)

    def get_last_progress_time(self) -> int:
        """Wall time of the last sign of life; a server that sleeps as planned is alive now."""
        return int(self._watchdog.last_progress())

    def _open(self) -> None:
        if self._pipe is None:
            self._pipe = Pipe(self._file_path)

    def _overdue(self, pid: int, requests: list[FileTimerRequest], expired: list[Expired]) -> None:
        if pid not in self._watchdog.workers.known:
            # It ended, or never was a worker of ours: to look the pid up now might find another process.
            self._watchdog.drop("no worker of this server")
            return
        for request in requests:
            self._event("timer expired", request)
        known = expiry_log.facts(pid)
        # Two scopes may want different signals: each is sent once, in the order of expiry.
        for wanted in dict.fromkeys(request.signal for request in requests):
            if wanted and self._reap_worker(pid, wanted):
                first = next(request for request in requests if request.signal == wanted)
                self._event("kill worker process", first)
        expiry_log.tell(self._run_id, {pid: [one.scope for one in expired]}, {pid: known})

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Signals the worker if it is still the process that asked; True when it is signalled or gone."""
        return self._watchdog.signal(worker_pid, signal)

    def _event(self, name: str, request: FileTimerRequest | None) -> None:
        if self._log_event is None:
            return
        try:
            self._log_event(name, request)
        except Exception as error:  # noqa: BLE001 - a listener's trouble is not the watchdog's
            say("error", f"timers: log_event({name!r}): {type(error).__name__}: {error}")
