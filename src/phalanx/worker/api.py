"""What `phalanx.worker` offers to user code: calls on a board of memory that is shared with the agent.

Invariants
- A heartbeat is a copy into memory shared with the agent (worker/board.py): no system call, no lock.
- The calls have no effect in processes that the worker forks or starts, so that a data loader can neither
  hide a hang of its parent nor be mistaken for it.
- The shared memory is private to worker and agent: no file, no network.
"""

from __future__ import annotations

import mmap
import os
import sys
from time import monotonic

from phalanx.worker.board import (
    ASKED,
    ASKED_AT,
    BEAT,
    BEAT_AT,
    CHECKPOINT_AT,
    DEADLINE_AT,
    FIRST_AT,
    LISTENS_AT,
    MAGIC,
    MARK_AT,
    MOMENT,
    PASSED_AT,
    PID,
    PID_AT,
    PREEMPTED_AT,
    READY_AT,
    SAVED,
    SAVED_AT,
    SECTION_AT,
    SECTION_BYTES,
    SIGNAL_AT,
    SIZE,
    TIME,
    VARIABLE,
    WAITS_AT,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import TypeVar

    from phalanx.worker.state.pending_save import PendingSave
    from phalanx.worker.state.rank_state import Kept, RankState

    Callback = TypeVar("Callback", bound=Callable[[], object])

_CHECKPOINT = "checkpoint"  # the section whose time the goodput ledger books by itself
_STANDBY = "_phalanx_standby"  # of helpers/script_standby.py, in sys.modules: this process waits for a rank

_board: mmap.mmap | None = None  # None: not a Phalanx worker
_bell = -1
_count = 0
_watched = 1  # the number of the heartbeat that the goodput ledger waits for
_watched_step = 0  # the step at the one that it last looked at, and its number
_watched_count = 0
_saved = _saved_since_beat = _saving_since = 0.0  # seconds in checkpoint sections
_saved_count = 0  # heartbeats sent when the last one of them ended
_asked_step, _asked_at, _pace = -1, 0.0, 0.0  # the last should_checkpoint(step); seconds per step
_pack_beat = BEAT.pack_into
_sections: list[str] = []
_state: tuple[str, RankState] | None = None  # what it was made from, and it
_callbacks: list[Callable[[], object]] = []
_deadlines: dict[object, float] = {}
_shielded = 0  # a signal that this module ignores; 0: none
_early: dict[str, int | None] = {}  # calls of a standby, made good when it has its rank
_agent_deadline = 0.0  # the earliest time at which the agent is known to check the deadline


def heartbeat(step: int | None = None) -> None:
    """Report progress, with the step number if steps are counted. Cheap enough for every step."""
    global _count
    board = _board
    if board is None:
        if _STANDBY in sys.modules:
            _early["beat"] = step
        return
    _count += 1
    _pack_beat(board, BEAT_AT, -1 if step is None else step, monotonic(), _count)
    if _count == _watched:
        _note_beat(board, step)
    if _callbacks and board[PREEMPTED_AT]:
        _run_callbacks()


def ready() -> None:
    """Report that the worker is set up. A first heartbeat implies it."""
    board = _board
    if board is not None:
        TIME.pack_into(board, READY_AT, monotonic())
        _wake_agent()
    elif _STANDBY in sys.modules:
        _early["ready"] = None


def wait_for_rank() -> None:
    """Mark the point up to which the next incarnation of this worker can be prepared.

    Call it after the imports, the model and the warm-up, and before the process group is set up or RANK is
    read. It returns at once, except in a standby (--warm standby), which runs the script up to here while
    the current workers still run, and goes on when a restart needs it. Until then a standby has LOCAL_RANK
    and LOCAL_WORLD_SIZE, but neither RANK, WORLD_SIZE nor the address of the others.
    """
    standby = sys.modules.get(_STANDBY)
    if standby is not None and standby.pid == os.getpid():
        _prepare()
        standby.wait()
        _connect()
        _make_good()
    board = _board
    if board is not None:
        board[WAITS_AT] = 1
        _wake_agent()


def _prepare() -> None:
    """In a standby, where nobody waits for it: what `agree` and `kept` would do at their first use.

    Only if torch has loaded all that is imported for it, except our own modules: the program must not be able
    to tell a standby from a start from scratch by what is loaded.
    """
    if "torch.distributed" in sys.modules:
        import phalanx.store.tcpstore.client
        import phalanx.worker.state.agreement
        import phalanx.worker.state.rank_state  # noqa: F401
        from phalanx.worker.state.device_load import pin_ahead

        pin_ahead()


def _make_good() -> None:
    """Repeat what was called in the standby, which had no board to write to."""
    if _callbacks and _board is not None:
        _listen(_board)
    if "ready" in _early:
        ready()
    if "beat" in _early:
        heartbeat(_early["beat"])
    _early.clear()


def should_checkpoint(step: int | None = None) -> bool:
    """Whether this worker is about to be preempted: save a checkpoint and exit within the grace period.

    With a step number, which only grows, it becomes true at the same step in all ranks of the job that pass
    one: for saves in which all ranks take part. That step is about a second ahead of the ranks when the
    preemption is announced, and at least two steps. No call waits.
    """
    board = _board
    if board is None:
        return False
    if not board[LISTENS_AT]:
        board[LISTENS_AT] = 1
        _shield(board[SIGNAL_AT])
    if step is not None and step != _asked_step:
        _note_asked(board, step)
    if not board[PREEMPTED_AT]:
        return False
    if step is not None and not 0 < PID.unpack_from(board, CHECKPOINT_AT)[0] <= step + 1:
        return False
    if _callbacks:
        _run_callbacks()
    return True


def on_preempt(callback: Callback) -> Callback:
    """Call `callback()` once when this worker is about to be preempted; usable as a decorator.

    The preemption signal calls it in the main thread, between any two operations of the program (to save at
    a well-defined point, use should_checkpoint). If the program handles that signal itself, or if this was
    called in another thread, the next heartbeat calls it.
    """
    board = _board
    if board is not None:
        _callbacks.append(callback)
        _listen(board)
        if board[PREEMPTED_AT]:
            _run_callbacks()
    elif _STANDBY in sys.modules:
        _callbacks.append(callback)
    return callback


class section:
    """`with section("eval"):` names the current activity for status and reports; nested names join by `/`."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _board is not None:
            name = str(self._name)
            if name == _CHECKPOINT and name not in _sections:
                _begin_saving(_board)
            _sections.append(name)
            _write_section(_board)

    def __exit__(self, *_: object) -> None:
        if _board is not None and _sections:
            if _sections.pop() == _CHECKPOINT and _CHECKPOINT not in _sections:
                _end_saving(_board)
            _write_section(_board)


class expires:
    """`with expires(60):` a block that takes longer, in seconds, is handled as a hang (--on-hang)."""

    __slots__ = ("_after", "_keys")

    def __init__(self, after: float) -> None:
        if not after > 0:
            raise ValueError(f"expires({after!r}): give a number of seconds above 0")
        self._after = after
        self._keys: list[object] = []  # one per entry

    def __enter__(self) -> None:
        global _agent_deadline
        if _board is None:
            return
        now = monotonic()
        key = object()
        self._keys.append(key)
        _deadlines[key] = now + self._after
        first = _write_deadline(_board)
        # The agent checks at `_agent_deadline` in any case, and then sees the current deadline.
        if not now < _agent_deadline <= first:
            _agent_deadline = first
            _wake_agent()

    def __exit__(self, *_: object) -> None:
        if self._keys and _deadlines.pop(self._keys.pop(), None) is not None and _board is not None:
            _write_deadline(_board)


def keep(name: str, tree: object, step: int, *, wait: bool = True) -> PendingSave:
    """Save a tree of tensors, arrays and anything that pickle takes, in memory that outlives this process.

    Two saves are held for each name, three with --keep-replicas: a new one replaces an older one when it is
    whole. With `wait=False`, CUDA tensors are copied while the program goes on; `wait()` of what is returned
    waits for that.
    """
    state = _rank_state()
    if state is not None:
        return state.keep(name, tree, step, wait)
    from phalanx.worker.state.pending_save import PendingSave

    return PendingSave()


def kept(name: str, step: int | None = None, *, anywhere: bool = False, device: object = None) -> Kept | None:
    """What this rank kept: the newest whole save, or that of `step`; None if there is none.

    Only what was kept by the same rank in a world of the same size; with `anywhere`, whatever was kept by the
    worker whose memory this one has. Arrays are views of that memory, on the CPU; what is written to them
    stays in this process. With `device`, tensors that were on a CUDA device are copied there.
    """
    state = _rank_state()
    return None if state is None else state.kept(name, step, anywhere, device)


def agree(name: str, timeout: float = 300.0) -> int | None:
    """The newest step that every rank has kept; None if there is none. To be called by every rank.

    Each rank forgets its newer saves of this name, so that `kept` returns this one.
    """
    state = _rank_state()
    if state is None:
        return None
    from phalanx.worker.state.agreement import agree

    return agree(state, name, timeout)


def supervised() -> bool:
    """Whether this process is a Phalanx worker, so that the calls here have an effect."""
    return _board is not None


def _rank_state() -> RankState | None:
    """The memory that the agent holds for this rank, if this process is a worker."""
    global _state
    if _board is None:
        return None
    text = os.environ.get("PHALANX_STATE", "")
    if _state is None or _state[0] != text:
        from phalanx.worker.state.rank_state import RankState, read_place

        place = read_place(text)
        if place is None:
            return None
        if _state is not None and _state[1].place.inode == place.inode:
            _state[1].move(place)
            _state = text, _state[1]
        else:
            _state = text, RankState(place)
    return _state[1]


def _note_beat(board: mmap.mmap, step: int | None) -> None:
    """This heartbeat is the first one, or the first to reach the step of an earlier start, or near it."""
    global _watched, _watched_step, _watched_count
    now, stride = monotonic(), 1.0
    if _count == 1:
        MOMENT.pack_into(board, FIRST_AT, -1 if step is None else step, now, _saved)
        _wake_agent()
    elif step is not None and _count > _watched_count:
        stride = max(1.0, (step - _watched_step) / (_count - _watched_count))
    mark = PID.unpack_from(board, MARK_AT)[0] - 1
    if step is None or mark < 0:
        return
    if step >= mark:
        MOMENT.pack_into(board, PASSED_AT, step, now, _saved)
        return
    # Not every heartbeat is looked at: the one that should reach it, by the pace so far; at first the next.
    ahead = int((mark - step) / stride) if _watched_count else 1
    _watched, _watched_step, _watched_count = _count + max(1, ahead), step, _count


def _note_asked(board: mmap.mmap, step: int) -> None:
    """The shortest of the last few steps is the pace: an evaluation or a compilation in between is not."""
    global _asked_step, _asked_at, _pace
    now = monotonic()
    if 0 <= _asked_step < step:
        took = (now - _asked_at) / (step - _asked_step)
        _pace = min(took, 1.5 * _pace) if _pace else took
    _asked_step, _asked_at = step, now
    ASKED.pack_into(board, ASKED_AT, step + 1, _pace)


def _begin_saving(board: mmap.mmap) -> None:
    global _saving_since
    _saving_since = monotonic()
    SAVED.pack_into(board, SAVED_AT, _saved, _saved_since_beat, _saved_count, _saving_since)


def _end_saving(board: mmap.mmap) -> None:
    global _saved, _saved_since_beat, _saved_count, _saving_since
    took = monotonic() - _saving_since
    if _saved_count != _count:
        _saved_count, _saved_since_beat = _count, 0.0
    _saved, _saved_since_beat, _saving_since = _saved + took, _saved_since_beat + took, 0.0
    SAVED.pack_into(board, SAVED_AT, _saved, _saved_since_beat, _saved_count, 0.0)


def _write_section(board: mmap.mmap) -> None:
    text = "/".join(_sections).encode("utf-8", "replace")[: SECTION_BYTES - 1]
    board[SECTION_AT : SECTION_AT + 1 + len(text)] = bytes([len(text)]) + text


def _write_deadline(board: mmap.mmap) -> float:
    first = min(tuple(_deadlines.values()), default=0.0)
    TIME.pack_into(board, DEADLINE_AT, first)
    return first


def _run_callbacks() -> None:
    if _board is not None:
        _board[LISTENS_AT] = 1
    while _callbacks:
        _callbacks.pop(0)()


def _listen(board: mmap.mmap) -> None:
    """Make the preemption signal run the callbacks, unless the program handles it."""
    import signal
    import threading

    number = board[SIGNAL_AT]
    board[LISTENS_AT] = board[LISTENS_AT] or 1
    if not number or threading.current_thread() is not threading.main_thread():
        return
    # Python's default handler for SIGINT does not count as the program's.
    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, _ignore):
        signal.signal(number, _on_signal)
    if signal.getsignal(number) is _on_signal:
        board[LISTENS_AT] = 2


def _shield(number: int) -> None:
    """Outlive the announcement itself: schedulers send it to every process, and this one learns of it here.

    Only for signals that stop programs; the bootstrap has done it for the others.
    """
    import signal
    import threading

    global _shielded
    stops = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    if number not in stops or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(number, _ignore)
        _shielded = number


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """The agent has the signal too, and tells this worker through its board."""


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    _run_callbacks()


def _wake_agent() -> None:
    try:
        os.write(_bell, b"!")
    except OSError:
        pass  # full, so a wake-up is pending; or closed by a program that closes unknown descriptors


def _connect() -> None:
    """Map the board that the agent gave to this process, if it is a worker."""
    global _board, _bell
    try:
        board, bell, device, inode, _ = (int(part) for part in os.environ.get(VARIABLE, "").split(","))
        file = os.fstat(board)
        if (file.st_dev, file.st_ino) != (device, inode):
            return  # a child of a worker, where the descriptor is another file
        page = mmap.mmap(board, SIZE)
    except (ValueError, OSError):
        return
    if page[: len(MAGIC)] != MAGIC or not _claimed(page):
        page.close()
        return
    _board, _bell = page, bell


def _move() -> None:
    """This process has another place: map its board, and repeat there what still holds."""
    global _board, _count, _agent_deadline, _watched, _watched_step, _watched_count
    global _saved, _saved_since_beat, _saved_count, _saving_since, _asked_step, _asked_at, _pace
    _board, _count, _agent_deadline = None, 0, 0.0
    _asked_step, _asked_at, _pace = -1, 0.0, 0.0
    _watched, _watched_step, _watched_count = 1, 0, 0
    _saved = _saved_since_beat = _saving_since = 0.0
    _saved_count = 0
    _sections.clear()
    _deadlines.clear()
    _connect()
    _make_good()
    wait_for_rank()


def _claimed(page: mmap.mmap) -> bool:
    """Claim the board; False if it belongs to another live process."""
    (owner,) = PID.unpack_from(page, PID_AT)
    if owner not in (0, os.getpid()):
        try:
            os.kill(owner, 0)
            return False
        except ProcessLookupError:
            pass  # the previous program of a shell script
        except OSError:
            return False
    PID.pack_into(page, PID_AT, os.getpid())
    return True


def _disconnect() -> None:
    """In a forked child: the board belongs to the parent."""
    global _board
    _board = None
    _callbacks.clear()
    _deadlines.clear()
    if _shielded:
        import signal

        if signal.getsignal(_shielded) is _ignore:
            signal.signal(_shielded, signal.SIG_DFL)  # a pool ends its processes by SIGTERM
    _early.clear()
    sys.modules.pop(_STANDBY, None)


_connect()
os.register_at_fork(after_in_child=_disconnect)
