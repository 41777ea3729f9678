"""The worker's side of a recall: a thread that waits for it, and frees the main thread from what it does.

    registered ──recall──► pending ──the call has unwound──► parked ──go──► registered
        └── the call returns ──► left

* The thread blocks in a read; it costs nothing until a recall comes.
* On a recall it runs the abort hooks, then interrupts the main thread by SIGURG, whose default is to be
  ignored. The handler raises `Reentry` there, between two operations of the interpreter; the signal also
  ends system calls and waits for locks. It is repeated until the call has unwound, because an exception can
  get lost (in `__del__`, in a callback of C code) or be caught; never while a `Reentry` is being handled, so
  that `finally` blocks run to their end.
* The zygote is at the other end of the channel (helpers/zygote.py). When it is gone, so is this process.
"""

from __future__ import annotations

import _socket
import os
import queue
import signal
import sys
import threading

from phalanx.helpers.channel import Channel
from phalanx.helpers.messages import CanReenter, Handover, Parked, Recall, Unfit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any

    from phalanx.core.record import Record

    Hook = Callable[[], object]
    Go = tuple[Handover, list[int]]

_OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "reenter.py"))  # where no call is interrupted
_FIRST_WAIT = 0.01  # seconds between two interruptions, doubled up to
_LONGEST_WAIT = 0.25


class Reentry(BaseException):
    """Raised in the main thread of a worker that is to re-enter; `except Exception` does not catch it."""


class RecallWatch:
    """The recalls of one process. Made in the main thread."""

    def __init__(self, fd: int) -> None:
        self._channel = Channel(_socket.socket(fileno=fd))
        self._pid = os.getpid()
        self._main = threading.main_thread()
        self._lock = threading.Lock()  # of what follows
        self._registered = False  # the zygote knows of this worker
        self._inside = False  # the call is running
        self._pending = False  # a recall is to be obeyed
        self.cause = ""
        self.abort: Sequence[Hook] = ()
        self._again: Hook = lambda: None
        self._recalled = threading.Event()
        self._aborted = threading.Event()
        self._unwound = threading.Event()
        self._go: queue.SimpleQueue[Go] = queue.SimpleQueue()
        self._before: Any = signal.SIG_DFL
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)

    @property
    def pending(self) -> bool:
        """Whether a recall is to be obeyed."""
        return self._pending

    def _forget(self) -> None:
        """In a forked child: the channel is the parent's."""
        fd = self._channel.detach()
        if fd >= 0:
            os.close(fd)

    @property
    def _is_mine(self) -> bool:
        return os.getpid() == self._pid

    # -- the main thread --------------------------------------------------------------------------------

    def enter(self, abort: Sequence[Hook], again: Hook) -> None:
        """The call begins: this worker can be recalled. `again` is called until the call has unwound."""
        self.abort, self._again = abort, again
        with self._lock:
            self._pending = False
            self.cause = ""
            for event in (self._recalled, self._aborted, self._unwound):
                event.clear()
        current = signal.getsignal(signal.SIGURG)
        if current != self._on_signal:
            self._before = current
            signal.signal(signal.SIGURG, self._on_signal)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="phalanx-recall", daemon=True)
            self._thread.start()
        if not self._registered:
            self._registered = True
            self._send(CanReenter(True))
        self._inside = True

    def leave(self) -> bool:
        """The call has returned; False: it is to be made again."""
        if not self._is_mine:
            return True
        with self._lock:
            self._inside = False
            if self._pending:
                return False
            registered, self._registered = self._registered, False
        if registered:
            self._send(CanReenter(False))
            signal.signal(signal.SIGURG, self._before or signal.SIG_DFL)
        return True

    def out(self) -> None:
        """The call has ended with an error: nothing is interrupted any more."""
        self._inside = False

    def unwound(self, error: BaseException, patience: float) -> bool:
        """The call has ended with this error: whether it is due to a recall, which may be about to come."""
        if not self._is_mine:
            return False
        if patience and not self._pending:
            self._recalled.wait(patience)
        if not self._pending or (
            isinstance(error, KeyboardInterrupt | SystemExit) and not has_reentry(error)
        ):
            with self._lock:
                self._pending = False
            self.leave()
            return False
        return True

    def settle(self) -> None:
        """Stop interrupting; wait for the abort hooks: what they abort must not be destroyed meanwhile."""
        self._unwound.set()
        self._aborted.wait()

    def refuse(self, why: str) -> None:
        """This worker cannot re-enter; it is about to end."""
        self._send(Unfit(why))

    def park(self) -> Go:
        """Wait for the next place, and its descriptors."""
        self._send(Parked())
        return self._go.get()

    def _send(self, message: Record) -> None:
        try:
            self._channel.send(message)
        except OSError:
            pass  # the zygote is gone, and this process is about to be

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pending and self._inside and self._is_mine:
            ours = frame is not None and frame.f_code.co_filename in _OWN_FILES
            if not ours and not has_reentry(sys.exc_info()[1]):
                raise Reentry(self.cause)
        elif callable(self._before):
            self._before(number, frame)

    # -- the thread -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while True:
                message, fds = self._channel.receive()
                if isinstance(message, Recall):
                    self._obey(message.cause)
                elif isinstance(message, Handover):
                    self._go.put((message, fds))
        except (EOFError, OSError, ValueError):
            pass  # the zygote is gone; or the program has closed all descriptors
        if self._unwound.is_set():
            os._exit(1)  # parked, without a place to come

    def _obey(self, cause: str) -> None:
        with self._lock:
            if not self._registered:
                return  # the call has returned
            self._pending, self.cause = True, cause
        self._recalled.set()
        for hook in (*self.abort, self._again):
            _try(hook)
        self._aborted.set()
        wait = _FIRST_WAIT
        while self._inside and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, signal.SIGURG)
            if self._unwound.wait(wait):
                break
            wait = min(_LONGEST_WAIT, 2 * wait)
            _try(self._again)  # it may have gone on, to the next wait


def has_reentry(error: BaseException | None) -> bool:
    """Whether this exception is a `Reentry`, or followed one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, Reentry):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def _try(hook: Hook) -> None:
    try:
        hook()
    except Exception as error:  # noqa: BLE001 - the user's; the main thread is interrupted anyway
        _complain(f"abort hook: {type(error).__name__}: {error}")


def _complain(text: str) -> None:
    try:
        os.write(2, f"phalanx: {text}\n".encode(errors="replace"))
    except OSError:
        pass
