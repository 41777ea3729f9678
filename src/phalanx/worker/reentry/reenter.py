"""`worker.reenter`: a function that is called again, in the same process, for every round.

What happens at a recall, in this order: the abort hooks, in the thread of recall_watch.py; the call unwinds,
with its `finally` blocks; torch's process groups are destroyed, if there are any; the finalize hooks; the
check hooks; the process parks. When it has its next place (takeover.py), the function is called again.
"""

from __future__ import annotations

import functools
import os
import sys
import threading

from phalanx import kernel
from phalanx.worker.reentry.recall_watch import RecallWatch, Reentry
from phalanx.worker.reentry.takeover import ParkedStreams, ReentryPlace, Takeover, flush, read_place
from phalanx.worker.reentry.worker_round import WorkerRound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")
    Hook = Callable[[], object]
    Hooks = Hook | Sequence[Hook] | None

__all__ = ["Reentry", "WorkerRound", "reenter"]

_seat: Seat | None = None  # of this process, from the first call on


def reenter(
    function: Callable[..., Any] | None = None,
    *,
    abort: Hooks = None,
    finalize: Hooks = None,
    check: Hooks = None,
) -> Any:
    """Call the decorated function again, in this process, for every round; it gets the round first.

    Each hook is a function without arguments, or a list of them. `abort` frees the main thread from what it
    waits in, and runs in another thread; `finalize` tidies up after the call has unwound; a `check` that
    returns False or raises makes this process end, and a new one take its place. torch's process groups are
    aborted and destroyed without a hook.
    """
    hooks = ReentryHooks(abort, finalize, check)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(f"worker.reenter({function!r}): decorate a function that takes a round")

        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            return run(function, hooks, args, more)

        return call

    return decorate if function is None else decorate(function)


class ReentryHooks:
    """What a program does around a re-entry."""

    def __init__(self, abort: Hooks, finalize: Hooks, check: Hooks) -> None:
        self.abort = _listed("abort", abort)
        self.finalize = _listed("finalize", finalize)
        self.check = _listed("check", check)

    def unfit(self) -> str:
        """Run the finalize and the check hooks; why this process cannot go on, or nothing."""
        for what, hooks in (("finalize hook", self.finalize), ("check", self.check)):
            for hook in hooks:
                try:
                    answer = hook()
                except Exception as error:  # noqa: BLE001 - the user's
                    text = " ".join(str(error).split())
                    return f"{what}: {type(error).__name__}: {text}"[:300]
                if what == "check" and answer is not None and not answer:
                    return f"{what} {getattr(hook, '__name__', hook)} failed"
        return ""


def _listed(name: str, hooks: Hooks) -> list[Hook]:
    given: list[Any] = [] if hooks is None else list(hooks) if isinstance(hooks, list | tuple) else [hooks]
    for hook in given:
        if not callable(hook):
            raise TypeError(f"worker.reenter({name}={hook!r}): give a function, or a list of functions")
    return given


class Seat:
    """This process among the workers: its places, one after the other."""

    def __init__(self, place: ReentryPlace) -> None:
        self.place = place
        self.watch = RecallWatch(place.fd)
        self.given: dict[str, str] = {}  # the variables of the last hand-over
        self.before: tuple[int, int, int] | None = None
        self.busy = False

    def round(self) -> WorkerRound:
        return WorkerRound(self.place.number, self.place.cause, self.before)

    def wait_for_place(self, last: WorkerRound) -> None:
        """Park, and take the next place."""
        streams = ParkedStreams()
        takeover = Takeover(*self.watch.park())
        self.given = takeover.run(self.place, streams, self.given)
        self.before = last.number, last.rank, last.world_size
        place = read_place()
        assert place is not None, "it was set a moment ago"
        self.place = place
        from phalanx.worker import api

        api._move()
        _show_rank(last.rank, os.environ.get("RANK", ""))


def run(function: Callable[..., Any], hooks: ReentryHooks, args: Sequence[Any], more: dict[str, Any]) -> Any:
    """Call it for this round and for all that follow."""
    from phalanx.worker import api

    api.wait_for_rank()  # a standby is prepared up to here
    seat = _take_seat()
    if seat is None:
        return function(WorkerRound(), *args, **more)
    if seat.busy:
        raise RuntimeError("worker.reenter: one function at a time can re-enter, and it must not call itself")
    seat.busy = True
    try:
        while True:
            round = seat.round()
            over, result = _called(seat, round, function, hooks, args, more)
            if over:
                return result
            _end_round(seat, hooks)
            seat.wait_for_place(round)
    finally:
        seat.busy = False


def _called(
    seat: Seat,
    round: WorkerRound,
    function: Callable[..., Any],
    hooks: ReentryHooks,
    args: Sequence[Any],
    more: dict[str, Any],
) -> tuple[bool, Any]:
    """One call, and its result; False: it is to be made again. Nothing of it is referred to afterwards."""
    try:
        seat.watch.enter(hooks.abort, _abort_torch)
        result = function(round, *args, **more)
        if seat.watch.leave():
            return True, result
    except BaseException as error:
        seat.watch.out()
        if not seat.watch.unwound(error, seat.place.timeout if lost_peer(error, round) else 0.0):
            raise
        _clear(error)
    return False, None


def _end_round(seat: Seat, hooks: ReentryHooks) -> None:
    seat.watch.settle()
    why = ""
    try:
        if "torch.distributed" in sys.modules:
            from phalanx.worker.reentry import torch_groups

            torch_groups.destroy()
    except Exception as error:  # noqa: BLE001 - of a library; a new process has none of it
        why = f"process group: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
    why = why or hooks.unfit()
    if why:
        seat.watch.refuse(f"cannot re-enter ({why})")
        sys.stderr.write(f"phalanx: rank {os.environ.get('RANK')} cannot re-enter: {why}\n")
        flush()
        os._exit(1)


def _take_seat() -> Seat | None:
    global _seat
    if _seat is not None and _seat.watch._is_mine:
        return _seat
    place = read_place()
    if place is None:
        return None
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("worker.reenter: call the function in the main thread, which can be interrupted")
    _seat = Seat(place)
    return _seat


def lost_peer(error: BaseException, round: WorkerRound) -> bool:
    """Whether this error only tells that another rank is gone: a recall is on its way then."""
    if round.world_size == 1 or not isinstance(error, Exception):
        return False
    from phalanx.core.diagnosis.failures import echo_in

    first: BaseException = error
    while (earlier := first.__cause__ or first.__context__) is not None and earlier is not first:
        first = earlier
    return bool(echo_in(f"{type(first).__name__}: {first}"))


def _clear(error: BaseException) -> None:
    """Release what the frames of the call refer to: it may be most of the memory."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__context__, one.__cause__]
        trace, one.__traceback__ = one.__traceback__, None
        while trace is not None:
            try:
                trace.tb_frame.clear()
            except RuntimeError:
                pass  # it is being executed
            trace = trace.tb_next


def _abort_torch() -> None:
    if "torch.distributed" in sys.modules:
        from phalanx.worker.reentry import torch_groups

        torch_groups.abort()


def _show_rank(before: int, now: str) -> None:
    """What `ps` shows of this process."""
    if str(before) == now:
        return
    try:
        from setproctitle import getproctitle, setproctitle

        setproctitle(getproctitle().replace(f"[rank {before}]", f"[rank {now}]"))
    except ImportError:
        return
    kernel.set_name(os.path.basename(sys.executable))  # the title has changed it
