"""Follows the log files of a group of workers and copies whole lines to the console or to a file.

Workers write straight into their own files, so this code can neither block a worker nor lose its output. One
thread follows all files of a group: lines of different workers never mix on a destination, even if stdout and
stderr are the same pipe.

Invariants
- After `drain`, everything that the files held at the call is on the destinations or counted as not shown.
- No call waits without a bound for a destination.
- Each loss is counted (`lost`, by reason in `losses`) and each reason is logged once, except for a pipe whose
  reader has exited (`... | head`).
- The thread sleeps in `poll` until a file grows, a blocked destination has room, or another thread posts a
  command. Timers run only while a line is open or held back, just after output (`_LINGER`), and for files
  that cannot be watched.
- One block per destination is on its way at a time, taken from the files in turn. Memory is bounded by
  destinations x block size, whatever the workers write.
- An open line (too long to keep whole, or unfinished on a terminal) owns its destination until it ends, or
  until it has been silent for a while and another file has new output.
- In a pipe or a file, an unfinished line is shown after a time, so that a progress bar moves. Any other file
  may interrupt it at once: it is ended there, and continues on a line of its own.
- `_inbox`, `_sinks`, `_stopping`, `_ending` and the losses are shared; everything else belongs to the thread.
  `_cond` guards what both sides modify, and is notified when a file is done.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from select import POLLIN, POLLOUT, poll
from typing import TYPE_CHECKING, TextIO

from phalanx.agent.logs.followed_file import Containing, FollowedFile
from phalanx.agent.logs.inotify import Watcher
from phalanx.agent.logs.sinks import Sink, open_sink
from phalanx.job.environment import allows_colour

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from phalanx.agent.logs.repeated_tracebacks import RepeatedTracebacks
    from phalanx.observe.json_lines import JsonLines

__all__ = ["Containing", "LogFollower"]

_LINGER = 0.002  # after output, wait this long before arming watches again: fewer, larger blocks
_STALL = 30.0  # seconds without progress after which a destination is given up
_STOP_FLUSH = 0.25  # how long `stop` lets a half-written block finish
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Drain:
    """A drain in progress: the files that have to end, and how long a destination may accept nothing."""

    def __init__(self, stall: float, now: float) -> None:
        self.stall = stall
        self.begun = now
        self.sources: list[FollowedFile] = []
        self.taken = False  # the thread has filled in `sources`

    @property
    def left(self) -> list[FollowedFile]:
        return [source for source in self.sources if not source.done]

    @property
    def over(self) -> bool:
        return self.taken and not self.left

    @property
    def give_up_at(self) -> float:
        # A sink's clock starts with the drain: it may have been quiet for hours before.
        return max([self.begun, *(source.sink.moved for source in self.left)]) + self.stall


class LogFollower:
    """Follows the log files of a group of workers to its destinations."""

    def __init__(
        self, name: str, poll_interval: float = 0.1, *, repeated_tracebacks: RepeatedTracebacks | None = None
    ) -> None:
        """`poll_interval`: how often to check files that cannot be watched.

        `repeated_tracebacks` shortens what is shown on streams; files get every line."""
        self.name = name
        self._repeated_tracebacks = repeated_tracebacks
        self.lost = 0  # bytes not shown
        self.losses: dict[str, int] = {}  # ... by reason
        self.thread: threading.Thread | None = None
        self._started = False
        self._stopping = False
        self._cond = threading.Condition()
        self._sinks: dict[Hashable, Sink] = {}
        self._streams: list[TextIO] = []  # kept alive: sinks are identified by id()
        self._prefixes: dict[str, int] = {}
        self._by_path: dict[str, list[FollowedFile]] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._ending: Drain | None = None
        self._over_r = self._over_w = -1
        self._signalled_over = False
        self._unwritten: list[str] = []  # warnings for which stderr had no room
        self._sources: set[FollowedFile] = set()
        self._poll_interval = max(0.01, poll_interval)
        self._wake_r = self._wake_w = -1
        self._resting: set[FollowedFile] = set()  # read to the end, watch not armed yet
        self._watched: dict[int, set[FollowedFile]] = {}
        self._watcher: Watcher | None = None
        self._finishing: list[FollowedFile] = []
        self._failed_filters: set[str] = set()

    def follow(
        self,
        path: str | os.PathLike[str],
        dst: TextIO | str | os.PathLike[str],
        prefix: str = "",
        line_filter: Callable[[str], bool] | None = None,
        json: JsonLines | None = None,
    ) -> None:
        """Shows the lines of a file (which need not exist yet) on a stream, or appends them to a path.

        With `json`, as objects; the same for all files of a destination.
        """
        if self._stopping:
            raise RuntimeError(f"log follower {self.name!r} is stopped; create another for {os.fspath(path)}")
        key, sink = open_sink(dst)
        with self._cond:
            known = self._sinks.get(key)
            if known is None:
                sink.lose = self._lose
                self._sinks[key] = sink
                if not isinstance(dst, str | os.PathLike):
                    self._streams.append(dst)
                    sink.repeated_tracebacks = self._repeated_tracebacks
            else:
                sink.close()
                sink = known
            if json is not None:
                sink.ignore_terminal()
            number = self._prefixes.setdefault(prefix, len(self._prefixes))
        source = FollowedFile(os.fspath(path), sink, _paint(prefix, number, sink), line_filter, json)
        self._by_path.setdefault(source.path, []).append(source)
        self._post(lambda: self._adopt(source))
        if self._started:
            self._run_thread()

    def position(self, path: str) -> int | None:
        """The first byte of a file that may still be read; None if nothing reads it. From any thread."""
        reading = (s for s in self._by_path.get(path, ()) if not s.done and not s.sink.dead)
        return min((source.offset for source in reading), default=None)

    def start(self) -> LogFollower:
        """Starts the thread, now or when the first file is added."""
        self._started = True
        if self._inbox:
            self._run_thread()
        return self

    def drain(self, stall: float = _STALL) -> int:
        """Shows everything the files hold now and stops following them; returns the bytes not shown.

        For use after the workers have exited. A destination that accepts nothing for `stall` seconds is
        given up.
        """
        _, sources = self._finish(None, stall)
        return sum(s.lost for s in sources)

    def finish(self, patience: float, stall: float = _STALL) -> bool:
        """Like `drain`, in steps: whether it is over, completed or given up, after `patience` seconds."""
        return self._finish(patience, stall)[0]

    def hurry(self, stall: float) -> None:
        """Lowers the stall limit of the drain in progress."""
        with self._cond:
            if self._ending is not None:
                self._ending.stall = min(self._ending.stall, stall)
        self._wake()

    def fileno(self) -> int:
        """Becomes readable when the drain that `finish` started is over."""
        with self._cond:
            if self._over_r < 0:
                self._over_r, self._over_w = os.pipe()
            self._note_progress()
            return self._over_r

    def _finish(self, patience: float | None, stall: float) -> tuple[bool, list[FollowedFile]]:
        if self._stopping or not (self._inbox or self.thread):
            return True, []
        with self._cond:
            begun = self._ending
            ending = begun or Drain(stall, time.monotonic())
            self._ending = ending
        if begun is None:
            self._post(lambda: self._finish_all(ending))
            self._run_thread()
        until = None if patience is None else time.monotonic() + patience
        with self._cond:
            while not ending.over:
                now = time.monotonic()
                if ending.give_up_at <= now:
                    if not ending.taken:  # the thread is stuck in a stream's own write
                        ending.sources.extend(s for s in self._sources if not s.done)
                        ending.taken = True
                    self._give_up(ending)
                    break
                if until is not None and until <= now:
                    return False, ending.sources
                self._cond.wait(min(ending.give_up_at, until or ending.give_up_at) - now)
            self._ending = None
        self._warn_again()
        return True, ending.sources

    def _note_progress(self) -> None:
        """Called with `_cond` held whenever a file is done."""
        if self._over_w >= 0 and (self._ending is None or self._ending.over) and not self._signalled_over:
            self._signalled_over = True
            os.write(self._over_w, b"!")
        self._cond.notify_all()

    def stop(self) -> None:
        """Stops the thread at once (call `drain` first to show everything); bounded, idempotent."""
        self._stopping = True
        thread = self.thread
        if thread is threading.current_thread():
            return
        if thread is None:
            for sink in self._sinks.values():
                sink.close()
            self._sinks.clear()
        else:
            self._wake()
            # Bounded: a user's stream may block for ever. The thread is a daemon and may stay behind.
            thread.join(_STOP_FLUSH + 1.0)
            self._warn_again()
        with self._cond:
            for fd in {self._over_r, self._over_w} - {-1}:
                os.close(fd)
            self._over_r = self._over_w = -1

    # ---- losses

    def _lose(self, sink: Sink, source: FollowedFile | None, count: int, why: str) -> None:
        if source is not None:
            source.lost += count
        self.lost += count
        first = why not in self.losses
        self.losses[why] = self.losses.get(why, 0) + count
        if first and not sink.unread:
            self._warn(f"{why}: some worker output was not shown; see the log files")

    def _warn(self, line: str) -> None:
        # Never log to a blocked stderr: the handler's lock would block the whole agent.
        room = poll()
        room.register(2, POLLOUT)
        if not room.poll(0):
            self._unwritten.append(line)
            return
        try:
            from phalanx.log import warn

            warn(line)
        except (ImportError, OSError):  # out of descriptors, and logging was never imported
            self._unwritten.append(line)

    def _warn_again(self) -> None:
        lines, self._unwritten = self._unwritten, []
        for line in lines:
            self._warn(line)

    def _give_up(self, ending: Drain) -> None:
        """Counts what stalled destinations did not accept; runs in the caller if the thread is stuck."""
        for source in ending.left:
            sink = source.sink
            count = source.unshown() + (sink.unshown() if sink.pending_source is source else 0)
            source.done = True
            self._lose(sink, source, count, f"{sink.name} accepted nothing for {ending.stall:g} s")
            self._post(lambda source=source: self._forget(source))  # type: ignore[misc]  # bound per turn
        self._note_progress()

    # ---- the thread

    def _post(self, command: Callable[[], None]) -> None:
        """Makes the thread call `command`."""
        self._inbox.append(command)
        self._wake()

    def _wake(self) -> None:
        with self._cond:
            if self._wake_w >= 0:
                try:
                    os.write(self._wake_w, b"!")
                except BlockingIOError:
                    pass  # already awake

    def _run_thread(self) -> None:
        with self._cond:
            if self.thread is not None:
                return
            try:
                self._wake_r, self._wake_w = os.pipe()
                os.set_blocking(self._wake_w, False)
            except OSError:
                pass  # out of descriptors: the thread then checks its inbox at the polling rate
            self.thread = threading.Thread(target=self._main, name=f"logs-{self.name}", daemon=True)
            self.thread.start()

    def _main(self) -> None:
        block = signal.valid_signals() - {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
        # Signals belong to the main thread, and a blocked SIGPIPE cannot kill, whatever its handler is.
        signal.pthread_sigmask(signal.SIG_BLOCK, block)
        try:
            self._watcher = Watcher()
            self._loop()
        except BaseException as error:  # noqa: BLE001 - reported here; nothing else handles a thread's exception
            why = f"log follower {self.name} failed ({type(error).__name__}: {error})"
            for source in self._sources:
                self._lose(source.sink, source, source.unshown(), why)
        finally:
            self._close()

    def _loop(self) -> None:
        while not self._stopping:
            while self._inbox:
                self._inbox.popleft()()
            now = time.monotonic()
            busy = False
            for sink in tuple(self._sinks.values()):
                if (sink.ready or sink.pending) and self._serve(sink, now):
                    busy = True
            if self._finishing:
                self._settle()
            ending = self._ending
            if ending is not None and ending.left and ending.give_up_at <= now:
                with self._cond:
                    self._give_up(ending)
            if not busy and not self._inbox:
                self._rest(now)
        end = time.monotonic() + _STOP_FLUSH
        for sink in self._sinks.values():
            while not sink.push() and time.monotonic() < end:
                self._poll(end - time.monotonic())

    def _close(self) -> None:
        with self._cond:
            for source in self._sources:
                source.close()
                source.done = True
            for sink in self._sinks.values():
                sink.close()
            self._sinks.clear()
            if self._watcher is not None:
                self._watcher.close()
            for fd in {self._wake_r, self._wake_w} - {-1}:
                os.close(fd)
            self._wake_r = self._wake_w = -1
            self._stopping = True
            self._note_progress()

    def _adopt(self, source: FollowedFile) -> None:
        self._sources.add(source)
        self._queue(source)

    def _queue(self, source: FollowedFile) -> None:
        self._resting.discard(source)
        if not source.queued and not source.done:
            source.queued = True
            source.sink.ready.append(source)

    def _serve(self, sink: Sink, now: float) -> bool:
        """Moves one block to one destination; False if nothing could be done."""
        if not sink.push():
            return False
        source = self._pick(sink, now)
        if source is None:
            return False
        source.queued = False
        sink.ready.remove(source)
        if sink.dead:
            if not source.lost:
                self._lose(sink, source, 0, sink.dead)
            if source.limit is not None:
                self._lose(sink, source, source.unshown(), sink.dead)
                source.offset = source.limit
                self._finishing.append(source)
            return True
        try:
            self._copy(source, now)
        except OSError as error:
            self._lose(sink, source, source.unshown(), f"{source.path} cannot be read: {error.strerror}")
            source.limit = source.offset
            self._finishing.append(source)
        return True

    def _pick(self, sink: Sink, now: float) -> FollowedFile | None:
        owner = sink.owner
        if owner is not None and not owner.done and not owner.yields:
            if owner.queued:
                return owner
            if now < owner.read_at + sink.hold:
                return None
        return sink.ready[0] if sink.ready else None

    def _copy(self, source: FollowedFile, now: float) -> None:
        """Reads one block of a file and passes its whole lines to the sink."""
        if source.fd < 0 and not self._open(source):
            if source.limit is not None:
                self._finishing.append(source)
            return
        due = source.show_at()
        silent = due is not None and now >= due
        seen = source.offset + source.scanned
        data, at_end = source.read(silent)
        if at_end and not data and self._shrunk(source):
            self._queue(source)
            return
        if data or source.limit is not None:
            used, block = source.frame(data, silent)
            source.offset += used
            if block:
                self._put(source, block, used)
        if source.filter_error and source.path not in self._failed_filters:
            self._failed_filters.add(source.path)
            self._warn(source.filter_error)
        if source.offset + source.scanned > seen:
            source.read_at = now
        source.note_held(now)
        if source.limit is not None and source.offset >= source.limit:
            self._finishing.append(source)
        elif at_end:
            self._resting.add(source)
        else:
            self._queue(source)

    def _put(self, source: FollowedFile, block: list[memoryview], used: int) -> None:
        sink = source.sink
        owner = sink.owner
        if owner is not None and owner is not source:
            # Another file's unfinished line: erase a progress bar (it redraws itself), end anything else.
            block.insert(0, memoryview(b"\r\x1b[K" if owner.bar else b"\n"))
            owner.open_line = owner.bar = False
        elif sink.overwrites not in (None, source):
            block.insert(0, memoryview(b"\x1b[K"))
        sink.owner = source if source.open_line else None
        sink.overwrites = source if sink.tty and block[-1][-1] == 0x0D else None
        sink.put(source, block, used)
        sink.push()

    def _shrunk(self, source: FollowedFile) -> bool:
        """Whether the file was truncated; reading then starts again at the top."""
        if os.fstat(source.fd).st_size >= source.offset:
            return False
        missed = max(0, source.size - source.offset)
        self._lose(source.sink, source, missed, f"{source.path} was truncated while it was followed")
        source.offset = source.scanned = source.size = 0
        if source.limit is not None:
            source.limit = os.fstat(source.fd).st_size
        return True

    def _open(self, source: FollowedFile) -> bool:
        self._unwatch(source)
        for watch_first in (False, True):
            if watch_first and source.limit is None:
                self._watch(source, os.path.dirname(source.path) or ".")
            try:
                # O_NONBLOCK: opening a named pipe must not block.
                source.fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                continue
            except OSError as error:
                source.polled = True
                why = f"{source.path} cannot be opened: {error.strerror}"
                self._lose(source.sink, source, source.on_disk() if source.limit is not None else 0, why)
                return False
            self._unwatch(source)
            if source.limit is not None:
                source.limit = os.fstat(source.fd).st_size
            return True
        return False

    def _watch(self, source: FollowedFile, directory: str | None = None) -> None:
        assert self._watcher is not None
        watcher = self._watcher
        wd = watcher.watch_dir(directory) if directory else watcher.watch_file(source.fd, source.path)
        source.watch, source.polled = wd, wd < 0
        if wd >= 0:
            self._watched.setdefault(wd, set()).add(source)

    def _unwatch(self, source: FollowedFile) -> None:
        wd, source.watch, source.polled = source.watch, -1, False
        others = self._watched.get(wd)
        if others is not None:
            others.discard(source)
            if not others:
                del self._watched[wd]
                assert self._watcher is not None
                self._watcher.unwatch(wd)

    # ---- waiting

    def _rest(self, now: float) -> None:
        """Sleeps until an event or a timer makes a file ready."""
        if self._resting:
            self._poll(_LINGER)
            if self._wake_grown(self._resting):
                return
            for source in tuple(self._resting):
                self._watch(source)
            # Once more after arming: a write in between raised no event.
            self._wake_grown(self._resting)
            self._resting.clear()
            return
        self._poll(self._timeout(now))
        self._wake_silent(time.monotonic())

    def _wake_grown(self, sources: Iterable[FollowedFile]) -> bool:
        found = False
        for source in tuple(sources):
            if source.fd < 0 or source.grew():
                if source.fd >= 0:
                    self._unwatch(source)
                self._queue(source)
                found = True
        return found

    def _timeout(self, now: float) -> float | None:
        times = [
            sink.owner.read_at + sink.hold
            for sink in self._sinks.values()
            if sink.owner is not None and sink.ready and not sink.pending
        ]
        ending = self._ending
        if ending is not None and ending.left:
            times.append(ending.give_up_at)
        if self._wake_r < 0:
            times.append(now + self._poll_interval)
        for source in self._sources:
            if source.sink.dead or source.queued:
                continue
            if source.polled:
                times.append(now + self._poll_interval)
            due = source.show_at()
            if due is not None:
                times.append(due)
        return max(0.0, min(times) - now) if times else None

    def _wake_silent(self, now: float) -> None:
        """Queues the files that a timer makes ready."""
        for source in self._sources:
            if source.queued or source.sink.dead:
                continue
            due = source.show_at()
            if (due is not None and now >= due) or (source.polled and (source.fd < 0 or source.grew())):
                self._unwatch(source)
                self._queue(source)

    def _poll(self, timeout: float | None) -> None:
        assert self._watcher is not None
        waiting = poll()
        if self._wake_r >= 0:
            waiting.register(self._wake_r, POLLIN)
        if self._watcher.fd >= 0:
            waiting.register(self._watcher.fd, POLLIN)
        for sink in self._sinks.values():
            if sink.pending and sink.fd >= 0:
                waiting.register(sink.fd, POLLOUT)
        for fd, _events in waiting.poll(None if timeout is None else max(1, int(timeout * 1000))):
            if fd == self._wake_r:
                os.read(fd, 4096)
            elif fd == self._watcher.fd:
                fired, overflow = self._watcher.read()
                for source in tuple(self._sources) if overflow else self._fired(fired):
                    self._queue(source)

    def _fired(self, watches: Iterable[int]) -> list[FollowedFile]:
        found: list[FollowedFile] = []
        for wd in watches:
            for source in self._watched.get(wd, ()):
                found.append(source)
                if source.fd >= 0:
                    source.watch = -1  # a file's watch is one-shot; a directory's stays
            if any(source.fd >= 0 for source in self._watched.get(wd, ())):
                del self._watched[wd]
        return found

    # ---- finishing

    def _finish_all(self, ending: Drain) -> None:
        """Ends every file at its present size."""
        with self._cond:
            ending.sources.extend(s for s in self._sources if not s.done)
            for source in ending.sources:
                source.limit = source.on_disk()
                self._queue(source)
            ending.taken = True
            self._note_progress()

    def _settle(self) -> None:
        """Ends the files whose last byte has left the sink."""
        still = []
        for source in self._finishing:
            if source.sink.pending_source is source:
                still.append(source)
            else:
                self._forget(source)
        self._finishing = still

    def _forget(self, source: FollowedFile) -> None:
        """Ends one file, whatever state it is in."""
        sink = source.sink
        if sink.pending_source is source:
            sink.pending, sink.pending_source, sink.torn = [], None, True
        if source.queued:
            source.queued = False
            sink.ready.remove(source)
        self._resting.discard(source)
        self._unwatch(source)
        self._sources.discard(source)
        with self._cond:
            source.close()
            source.done = True
            self._note_progress()


def _paint(prefix: str, number: int, sink: Sink) -> bytes:
    """The prefix as bytes; in a colour of its own on a terminal, unless NO_COLOR is set."""
    plain = prefix.encode("utf-8", "surrogateescape")
    if not prefix or not sink.tty or not allows_colour():
        return plain
    return b"\x1b[%dm%b\x1b[0m" % (_COLOURS[number % len(_COLOURS)], plain)
