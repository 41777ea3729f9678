"""Messages to the world outside, sent in order by a thread of its own; the job never waits for them.

The thread is started with the first message. Attempts, their time and the queue are bounded; a queue that is
full loses the newest message. Only the end of the launcher waits, for a bounded time in all, and counts what
was not delivered in one line. Where a message goes may be a secret: it is never printed.
"""

from __future__ import annotations

import abc
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence

from phalanx.job.environment import without_secrets
from phalanx.job.time_budgets import OUTBOX_END
from phalanx.log import warn

_ATTEMPTS = 3
_PAUSES = (1.0, 4.0)  # seconds before the second and the third attempt
_RUN = 15.0  # seconds for a command
_QUEUE = 64


class Undelivered(Exception):
    """An attempt failed; `final`: another one would, too."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class Outbox(abc.ABC):
    """A queue and the thread that empties it."""

    def __init__(self, option: str, what: str) -> None:
        """`option` and `what`: who sends, and what, as lines about it say."""
        self._option, self._what = option, what
        self._queue: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sending = False
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = 0
        self._told = False

    @abc.abstractmethod
    def deliver(self, body: bytes) -> None:
        """Make one attempt, in the thread; raises Undelivered."""

    def put(self, body: bytes) -> None:
        """Queue a message; returns at once."""
        with self._changed:
            if self._closed or len(self._queue) >= _QUEUE:
                self._failed += 1
                return
            self._queue.append(body)
            if self._thread is None:
                name = f"phalanx{self._option[1:]}"
                self._thread = threading.Thread(target=self._main, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, patience: float = OUTBOX_END) -> None:
        """Wait until everything is sent, but not for long; what is not, is counted in one line."""
        end = time.monotonic() + patience
        with self._changed:
            while (self._queue or self._sending) and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            self._closed = True
            left = self._failed + len(self._queue) + self._sending
            self._changed.notify_all()
            process = self._process
        if process is not None:
            _kill(process)
        if self._thread is not None:
            self._thread.join(1.0)
        if left:
            warn(f"{self._option}: {left} {self._what}{'s' * (left != 1)} could not be delivered")

    def _main(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                body = self._queue.popleft()
                self._sending = True
            delivered = self._try(body)
            with self._changed:
                self._sending = False
                self._failed += not delivered and not self._closed
                self._changed.notify_all()

    def _try(self, body: bytes) -> bool:
        for attempt in range(_ATTEMPTS):
            try:
                self.deliver(body)
                return True
            except Undelivered as error:
                if not self._told and not self._closed:
                    self._told = True
                    warn(f"{self._option}: {error}")
                if error.final or attempt == _ATTEMPTS - 1:
                    return False
            with self._changed:
                if self._closed or self._changed.wait_for(lambda: self._closed, _PAUSES[attempt]):
                    return False
        return False

    def run(self, command: Sequence[str], body: bytes, limit: float = _RUN) -> int:
        """Run a command with the message on its stdin, for `limit` seconds at most; its exit code."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=without_secrets(),
                start_new_session=True,  # a Ctrl-C is for the job
            )
        except OSError as error:
            raise Undelivered(f"the command cannot be started: {error.strerror}") from None
        with self._changed:
            self._process = process
            if self._closed:
                _kill(process)
        try:
            process.communicate(body, timeout=limit)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            raise Undelivered(f"the command did not end within {limit:g} s") from None
        except OSError:  # it does not read its stdin
            process.wait()
        finally:
            with self._changed:
                self._process = None
        return process.returncode


def _kill(process: subprocess.Popen[bytes]) -> None:
    import os
    import signal

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
