"""What a worker may tell its agent, and hear from it. Every call does nothing outside Phalanx.

    from phalanx import worker

    worker.ready()                       # set up; --startup-timeout no longer applies
    for step, batch in enumerate(data):
        with worker.section("step"), worker.expires(60):
            train(batch)
        worker.heartbeat(step)           # --heartbeat-timeout: from one to the next
        if worker.should_checkpoint():   # the machine is going to be taken away
            save()
            break

Invariants
- A heartbeat is a copy into memory that the agent shares (supervision/heartbeat.py): no system call, no lock.
- Only the worker speaks: a process that it forks or starts finds these calls without effect, so that a data
  loader can neither hide a hang of its parent nor be taken for it.
- What is read and written here is private to the two processes; nothing of it is in a file or on a network.
"""

from __future__ import annotations

import mmap
import os
from time import monotonic

from phalanx.supervision.heartbeat import (
    BEAT,
    BEAT_AT,
    DEADLINE_AT,
    LISTENS_AT,
    MAGIC,
    PID,
    PID_AT,
    PREEMPTED_AT,
    READY_AT,
    SECTION_AT,
    SECTION_BYTES,
    SIGNAL_AT,
    SIZE,
    TIME,
    VARIABLE,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import TypeVar

    Callback = TypeVar("Callback", bound=Callable[[], object])

__all__ = ["expires", "heartbeat", "on_preempt", "ready", "section", "should_checkpoint", "supervised"]

_board: mmap.mmap | None = None  # None: not a worker of Phalanx
_bell = -1
_count = 0
_pack_beat = BEAT.pack_into
_sections: list[str] = []
_callbacks: list[Callable[[], object]] = []
_deadlines: dict[object, float] = {}
_rung = 0.0  # the earliest time at which the agent is known to look at our deadline


def heartbeat(step: int | None = None) -> None:
    """Progress is made: at `step`, where steps are counted. Cheap enough for every step."""
    global _count
    board = _board
    if board is None:
        return
    _count += 1
    _pack_beat(board, BEAT_AT, -1 if step is None else step, monotonic(), _count)
    if _count == 1:
        _ring()
    if _callbacks and board[PREEMPTED_AT]:
        _run_callbacks()


def ready() -> None:
    """The worker is set up. A first heartbeat says the same."""
    board = _board
    if board is not None:
        TIME.pack_into(board, READY_AT, monotonic())
        _ring()


def should_checkpoint() -> bool:
    """Whether this worker is about to be preempted: save, and leave within the grace."""
    board = _board
    if board is None:
        return False
    board[LISTENS_AT] = 1
    if not board[PREEMPTED_AT]:
        return False
    if _callbacks:
        _run_callbacks()
    return True


def on_preempt(callback: Callback) -> Callback:
    """Call `callback()` once when this worker is about to be preempted; usable as a decorator.

    It is called in the main thread, by the signal that announces the preemption, between any two operations
    of the program (so not where that can be sure of its state: should_checkpoint is for that); or, where the
    program handles that signal itself or this was called in another thread, by the next heartbeat.
    """
    board = _board
    if board is not None:
        board[LISTENS_AT] = 1
        _callbacks.append(callback)
        _listen(board[SIGNAL_AT])
        if board[PREEMPTED_AT]:
            _run_callbacks()
    return callback


class section:
    """`with section("eval"):` what the worker is at, for the agent to tell; nested ones are joined by `/`."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _board is not None:
            _sections.append(str(self._name))
            _write_section(_board)

    def __exit__(self, *_: object) -> None:
        if _board is not None and _sections:
            _sections.pop()
            _write_section(_board)


class expires:
    """`with expires(60):` what is inside ends within so many seconds, or is handled as a hang (--on-hang)."""

    __slots__ = ("_after", "_keys")

    def __init__(self, after: float) -> None:
        if not after > 0:
            raise ValueError(f"expires({after!r}): give a number of seconds above 0")
        self._after = after
        self._keys: list[object] = []  # one for each time it was entered

    def __enter__(self) -> None:
        global _rung
        if _board is None:
            return
        now = monotonic()
        key = object()
        self._keys.append(key)
        _deadlines[key] = now + self._after
        first = _write_deadline(_board)
        # It looks at `_rung` in any case, and then sees whatever deadline there is by that time.
        if not now < _rung <= first:
            _rung = first
            _ring()

    def __exit__(self, *_: object) -> None:
        if self._keys and _deadlines.pop(self._keys.pop(), None) is not None and _board is not None:
            _write_deadline(_board)


def supervised() -> bool:
    """Whether this process is a worker of Phalanx, so that the calls here have an effect."""
    return _board is not None


def __getattr__(name: str) -> object:
    """`record`, for who has only this module in mind; it is loaded when it is used."""
    if name == "record":
        from phalanx.workers.record import record

        return record
    raise AttributeError(f"module 'phalanx.worker' has no attribute {name!r}")


# -- inside ---------------------------------------------------------------------------------------


def _write_section(board: mmap.mmap) -> None:
    text = "/".join(_sections).encode("utf-8", "replace")[: SECTION_BYTES - 1]
    board[SECTION_AT : SECTION_AT + 1 + len(text)] = bytes([len(text)]) + text


def _write_deadline(board: mmap.mmap) -> float:
    first = min(tuple(_deadlines.values()), default=0.0)
    TIME.pack_into(board, DEADLINE_AT, first)
    return first


def _run_callbacks() -> None:
    while _callbacks:
        _callbacks.pop(0)()


def _listen(number: int) -> None:
    """Have the preemption signal run the callbacks, where nobody else handles it."""
    import signal
    import threading

    if not number or threading.current_thread() is not threading.main_thread():
        return
    # SIGINT's own handler is Python's default: it counts as nobody's.
    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(number, _on_signal)


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    _run_callbacks()


def _ring() -> None:
    try:
        os.write(_bell, b"!")
    except OSError:
        pass  # full, so it rings anyway; or closed by a program that closes all it does not know


def _join() -> None:
    """Find the board that the agent gave to this process, if it is one of its workers."""
    global _board, _bell
    try:
        board, bell, device, inode, _ = (int(word) for word in os.environ.get(VARIABLE, "").split(","))
        file = os.fstat(board)
        if (file.st_dev, file.st_ino) != (device, inode):
            return  # inherited a number that is another file here: a child of a worker
        page = mmap.mmap(board, SIZE)
    except (ValueError, OSError):
        return
    if page[: len(MAGIC)] != MAGIC or not _claimed(page):
        page.close()
        return
    _board, _bell = page, bell


def _claimed(page: mmap.mmap) -> bool:
    """Whether the board is this process's; one that nobody has (a shell's, say) is taken."""
    (owner,) = PID.unpack_from(page, PID_AT)
    if owner not in (0, os.getpid()):
        try:
            os.kill(owner, 0)
            return False
        except ProcessLookupError:
            pass  # a shell script that runs one program after the other
        except OSError:
            return False
    PID.pack_into(page, PID_AT, os.getpid())
    return True


def _leave() -> None:
    """In a forked child: the board is the parent's."""
    global _board
    _board = None
    _callbacks.clear()
    _deadlines.clear()


_join()
os.register_at_fork(after_in_child=_leave)
