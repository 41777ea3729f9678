"""Shows what workers write: follows their log files and puts whole lines on the console.

Workers write straight into their own files, so nothing that happens here can block or lose a worker's
output. One thread (`follower.py`) follows all files of a group. That it is one is the point: lines of
different workers never mix on a destination, also when stdout and stderr are the same pipe.

Invariants
- After `drain` everything the files held at the call is on the destinations, or counted as not shown.
- No call here waits on a destination without a bound.
- Each loss is counted (`lost`, by reason in `losses`) and each reason said once on the logger "phalanx"; but
  nobody is told of a pipe whose reader has left (`... | head`): he left because he had seen enough.
"""

from __future__ import annotations

import os
import threading
import time
from select import POLLOUT, poll
from typing import TYPE_CHECKING, TextIO

from phalanx.logs.followed_file import Containing, FollowedFile
from phalanx.logs.follower import STOP_FLUSH, Drain, Follower
from phalanx.logs.sinks import Sink, open_sink

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Containing", "Tee"]

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Tee:
    """Follows the log files of a group of workers to its destinations."""

    def __init__(self, name: str, poll_interval: float = 0.1) -> None:
        self.name = name
        self.lost = 0  # bytes not shown
        self.losses: dict[str, int] = {}  # ... by reason
        self._follower = Follower(name, poll_interval, self._lose, self._say)
        self._follower.on_done = self._note_progress
        self._follower.give_up = self._give_up
        self._ending: Drain | None = None
        self._over_r = self._over_w = -1
        self._told_over = False
        self._streams: list[TextIO] = []  # kept alive: sinks are told apart by identity
        self._prefixes: dict[str, int] = {}
        self._started = False
        self._unsaid: list[str] = []

    def follow(
        self,
        path: str | os.PathLike[str],
        dst: TextIO | str | os.PathLike[str],
        prefix: str = "",
        line_filter: Callable[[str], bool] | None = None,
    ) -> None:
        """Shows the lines of a file (which need not exist yet) on a stream, or appends them to a path."""
        if self._follower.stopping:
            raise RuntimeError(f"tee {self.name!r} was stopped; make a new one to follow {os.fspath(path)}")
        key, sink = open_sink(dst)
        with self._follower.cond:
            known = self._follower.sinks.get(key)
            if known is None:
                sink.lose = self._lose
                self._follower.sinks[key] = sink
                if not isinstance(dst, str | os.PathLike):
                    self._streams.append(dst)
            else:
                sink.close()
                sink = known
            number = self._prefixes.setdefault(prefix, len(self._prefixes))
        source = FollowedFile(os.fspath(path), sink, _paint(prefix, number, sink), line_filter)
        self._follower.post(lambda: self._follower.adopt(source))
        if self._started:
            self._follower.run_thread()

    def start(self) -> Tee:
        """Starts to follow; without any file no thread is made."""
        self._started = True
        if self._follower.inbox:
            self._follower.run_thread()
        return self

    def drain(self, stall: float = 30.0) -> int:
        """Shows all that the files hold now and stops following them; the number of bytes not shown.

        For after the workers' exit. Ends early on a destination that accepts nothing for `stall` seconds.
        """
        _, sources = self._finish(None, stall)
        return sum(s.lost for s in sources)

    def finish(self, patience: float, stall: float = 30.0) -> bool:
        """The same in steps: whether it is over after `patience`, if only because it was given up."""
        return self._finish(patience, stall)[0]

    def hurry(self, stall: float) -> None:
        """Have less patience with a destination, in a `finish` that was not over yet."""
        with self._follower.cond:
            if self._ending is not None:
                self._ending.stall = min(self._ending.stall, stall)
        self._follower.wake()

    def fileno(self) -> int:
        """Readable once `finish`, which was not over yet, has nothing left to wait for."""
        with self._follower.cond:
            if self._over_r < 0:
                self._over_r, self._over_w = os.pipe()
            self._note_progress()
            return self._over_r

    def _finish(self, patience: float | None, stall: float) -> tuple[bool, list[FollowedFile]]:
        follower = self._follower
        if follower.stopping or not (follower.inbox or follower.thread):
            return True, []
        with follower.cond:
            begun = self._ending
            ending = begun or Drain(stall, time.monotonic())
            self._ending = ending
        if begun is None:
            follower.post(lambda: follower.finish_all(ending))
            follower.run_thread()
        until = None if patience is None else time.monotonic() + patience
        with follower.cond:
            while not ending.over:
                now = time.monotonic()
                if ending.give_up_at <= now:
                    if not ending.taken:  # the thread is stuck in a stream's own write
                        ending.sources.extend(s for s in follower.sources if not s.done)
                        ending.taken = True
                    self._give_up(ending)
                    break
                if until is not None and until <= now:
                    return False, ending.sources
                follower.cond.wait(min(ending.give_up_at, until or ending.give_up_at) - now)
            if self._ending is ending:
                self._ending = None
        self._say_left()
        return True, ending.sources

    def _note_progress(self) -> None:
        """With `cond` held, whenever a source is done."""
        if self._over_w >= 0 and (self._ending is None or self._ending.over) and not self._told_over:
            self._told_over = True
            os.write(self._over_w, b"!")

    def stop(self) -> None:
        """Ends following at once (call `drain` first for completeness); bounded, idempotent."""
        self._follower.stopping = True
        thread = self._follower.thread
        if thread is threading.current_thread():
            return
        if thread is None:
            for sink in self._follower.sinks.values():
                sink.close()
            self._follower.sinks.clear()
        else:
            self._follower.wake()
            thread.join(
                STOP_FLUSH + 1.0
            )  # a stream of the user's may block for ever; a daemon thread may too
            self._say_left()
        with self._follower.cond:
            for fd in {self._over_r, self._over_w} - {-1}:
                os.close(fd)
            self._over_r = self._over_w = -1

    @property
    def alive(self) -> bool:
        """Whether the following thread runs."""
        return self._follower.thread is not None and self._follower.thread.is_alive()

    def _lose(self, sink: Sink, source: FollowedFile | None, count: int, why: str) -> None:
        if source is not None:
            source.lost += count
        self.lost += count
        first = why not in self.losses
        self.losses[why] = self.losses.get(why, 0) + count
        if first and not sink.unread:
            self._say(f"{why}: not all output of the workers is there; their log files have it")

    def _say(self, line: str) -> None:
        # Never log into a blocked stderr: the handler's lock would then hold up the whole agent.
        room = poll()
        room.register(2, POLLOUT)
        if not room.poll(0):
            self._unsaid.append(line)
            return
        try:
            from phalanx.log import warn

            warn(line)
        except (ImportError, OSError):  # out of descriptors, and logging was never imported
            self._unsaid.append(line)

    def _say_left(self) -> None:
        unsaid, self._unsaid = self._unsaid, []
        for line in unsaid:
            self._say(line)

    def _give_up(self, ending: Drain) -> None:
        """Counts what stalled destinations did not take; in the thread, or in the caller if that is stuck."""
        for source in ending.left:
            sink = source.sink
            count = source.unshown() + (sink.unshown() if sink.pending_source is source else 0)
            source.done = True
            self._lose(sink, source, count, f"{sink.name} accepted nothing for {ending.stall:g} s")
            self._follower.post(lambda source=source: self._follower.forget(source))  # type: ignore[misc]  # bound per turn
        self._note_progress()


def _paint(prefix: str, number: int, sink: Sink) -> bytes:
    """The prefix as bytes; on a terminal in a colour of its own, unless NO_COLOR says otherwise."""
    plain = prefix.encode("utf-8", "surrogateescape")
    if not prefix or not sink.tty or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return plain
    return b"\x1b[%dm%b\x1b[0m" % (_COLOURS[number % len(_COLOURS)], plain)
