"""The thread of a tee: follows log files and moves whole lines to their destinations.

Invariants
- Event-driven: asleep in `poll` until a file grows, a blocked destination has room, or the owner calls. The
  only timers run while a line is open or held back, just after output (`_LINGER`), and for files that
  cannot be watched.
- Per destination one block is on its way at a time, taken from the sources in turn. Memory is bounded by
  destinations x block, whatever the workers write.
- A line that is open (too long to keep whole, or unfinished on a terminal) owns its destination until it
  ends, or until it has been silent for a while and another source has something to say.
- Everything but `inbox`, `sinks` and `stopping` belongs to the thread; others post to it. `cond` guards what
  both sides touch, and is notified when a source is done.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from select import POLLIN, POLLOUT, poll
from typing import TYPE_CHECKING

from phalanx.logs.inotify import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from phalanx.logs.followed_file import FollowedFile
    from phalanx.logs.sinks import Sink

_LINGER = 0.002  # after output, gather for this long before arming watches again: fewer, larger blocks
_SHOW_PARTIAL = 0.1  # a terminal shows an unfinished line after this much silence
_HOLD_TERMINAL = 0.1  # silence after which an open line may be broken by another source
_HOLD_PIPE = 1.0
STOP_FLUSH = 0.25  # how long `stop` lets a half-written block finish


class Drain:
    """A drain in progress: the files that are to end, and how long a destination may take nothing."""

    def __init__(self, stall: float, now: float) -> None:
        self.stall = stall
        self.begun = now
        self.sources: list[FollowedFile] = []
        self.taken = False  # the thread knows of it, and `sources` is complete

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


class Follower:
    """The engine; `lose` and `say` are how it tells of trouble."""

    def __init__(
        self,
        name: str,
        poll_interval: float,
        lose: Callable[[Sink, FollowedFile | None, int, str], None],
        say: Callable[[str], None],
    ) -> None:
        self.name = name
        self.lose = lose
        self.say = say
        self.cond = threading.Condition()
        self.sinks: dict[Hashable, Sink] = {}
        self.inbox: deque[Callable[[], None]] = deque()
        self.thread: threading.Thread | None = None
        self.stopping = False
        self.on_done: Callable[[], None] = lambda: None  # a source is done; called with `cond` held
        self.give_up: Callable[[Drain], None] = lambda _: None
        self._ending: Drain | None = None
        self.sources: set[FollowedFile] = set()
        self._poll_interval = max(0.01, poll_interval)
        self._wake_r = self._wake_w = -1
        self._resting: set[FollowedFile] = set()  # read to the end, watch not armed yet
        self._watched: dict[int, set[FollowedFile]] = {}
        self._watcher: Watcher | None = None
        self._finishing: list[FollowedFile] = []
        self._told_filters: set[str] = set()

    def post(self, command: Callable[[], None]) -> None:
        """Has the thread call `command` soon."""
        self.inbox.append(command)
        self.wake()

    def wake(self) -> None:
        """Makes the thread look at its inbox."""
        with self.cond:
            if self._wake_w >= 0:
                try:
                    os.write(self._wake_w, b"\x01\0\0\0\0\0\0\0")
                except BlockingIOError:
                    pass  # already awake

    def run_thread(self) -> None:
        """Starts the thread unless it was started."""
        with self.cond:
            if self.thread is not None:
                return
            try:
                if hasattr(os, "eventfd"):
                    self._wake_r = self._wake_w = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                else:
                    self._wake_r, self._wake_w = os.pipe()
                    os.set_blocking(self._wake_r, False)
                    os.set_blocking(self._wake_w, False)
            except OSError:
                pass  # out of descriptors: the thread then looks into its inbox at the polling rate
            self.thread = threading.Thread(target=self._main, name=f"tee-{self.name}", daemon=True)
            self.thread.start()

    def _main(self) -> None:
        block = signal.valid_signals() - {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
        # Signals are the main thread's; and a blocked SIGPIPE cannot kill, whatever its handler is.
        signal.pthread_sigmask(signal.SIG_BLOCK, block)
        try:
            self._watcher = Watcher()
            self._loop()
        except BaseException as error:  # noqa: BLE001 - told here; a daemon thread's traceback is nobody's
            self.say(f"tee {self.name}: stopped by {type(error).__name__}: {error}; see the log files")
            for source in self.sources:
                self.lose(source.sink, source, source.unshown(), "the tee stopped early")
        finally:
            self._close()

    def _loop(self) -> None:
        while not self.stopping:
            while self.inbox:
                self.inbox.popleft()()
            now = time.monotonic()
            busy = False
            for sink in tuple(self.sinks.values()):
                if (sink.ready or sink.pending) and self._serve(sink, now):
                    busy = True
            if self._finishing:
                self._settle()
            if self._ending is not None:
                self._keep_to_the_end(self._ending, now)
            if not busy and not self.inbox:
                self._rest(now)
        end = time.monotonic() + STOP_FLUSH
        for sink in self.sinks.values():
            while not sink.push() and time.monotonic() < end:
                self._poll(end - time.monotonic())

    def _close(self) -> None:
        with self.cond:
            for source in self.sources:
                source.close()
                source.done = True
            for sink in self.sinks.values():
                sink.close()
            self.sinks.clear()
            if self._watcher is not None:
                self._watcher.close()
            for fd in {self._wake_r, self._wake_w} - {-1}:
                os.close(fd)
            self._wake_r = self._wake_w = -1
            self.stopping = True
            self.on_done()
            self.cond.notify_all()

    def adopt(self, source: FollowedFile) -> None:
        """Takes on one more file."""
        self.sources.add(source)
        self._queue(source)

    def _queue(self, source: FollowedFile) -> None:
        self._resting.discard(source)
        if not source.queued and not source.done:
            source.queued = True
            source.sink.ready.append(source)

    def _serve(self, sink: Sink, now: float) -> bool:
        """Moves one block to one destination; False when nothing could be done."""
        if not sink.push():
            return False
        source = self._pick(sink, now)
        if source is None:
            return False
        source.queued = False
        sink.ready.remove(source)
        if sink.dead:
            if not source.lost:
                self.lose(sink, source, 0, sink.dead)
            if source.limit is not None:
                self.lose(sink, source, source.unshown(), sink.dead)
                source.offset = source.limit
                self._finishing.append(source)
            return True
        try:
            self._copy(source, now)
        except OSError as error:
            self.lose(sink, source, source.unshown(), f"{source.path} cannot be read: {error.strerror}")
            source.limit = source.offset
            self._finishing.append(source)
        return True

    def _pick(self, sink: Sink, now: float) -> FollowedFile | None:
        owner = sink.owner
        if owner is not None and not owner.done:
            if owner.queued:
                return owner
            if now < owner.spoke + (_HOLD_TERMINAL if sink.tty else _HOLD_PIPE):
                return None
        return sink.ready[0] if sink.ready else None

    def _copy(self, source: FollowedFile, now: float) -> None:
        """Reads one block of a source and hands its whole lines to the sink."""
        if source.fd < 0 and not self._open(source):
            if source.limit is not None:
                self._finishing.append(source)
            return
        silent = source.sink.tty and source.scanned > 0 and now >= source.spoke + _SHOW_PARTIAL
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
        if source.filter_error and source.path not in self._told_filters:
            self._told_filters.add(source.path)
            self.say(source.filter_error)
        if source.offset + source.scanned > seen:
            source.spoke = now
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
            # Another's unfinished line: a bar is wiped (it redraws itself), anything else gets its newline.
            block.insert(0, memoryview(b"\r\x1b[K" if owner.bar else b"\n"))
            owner.open_line = owner.bar = False
        elif sink.overwrites not in (None, source):
            block.insert(0, memoryview(b"\x1b[K"))
        sink.owner = source if source.open_line else None
        sink.overwrites = source if sink.tty and block[-1][-1] == 0x0D else None
        sink.put(source, block, used)
        sink.push()

    def _shrunk(self, source: FollowedFile) -> bool:
        """Starts again at the top of a file that was truncated under us."""
        if os.fstat(source.fd).st_size >= source.offset:
            return False
        missed = max(0, source.size - source.offset)
        self.lose(source.sink, source, missed, f"{source.path} was truncated while it was followed")
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
                # O_NONBLOCK: a named pipe by that name must not stop everything.
                source.fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                continue
            except OSError as error:
                source.polled = True
                why = f"{source.path} cannot be opened: {error.strerror}"
                self.lose(source.sink, source, source.on_disk() if source.limit is not None else 0, why)
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
        """Sleeps until there is something to do."""
        if self._resting:
            self._poll(_LINGER)
            if self._wake_grown(self._resting):
                return
            for source in tuple(self._resting):
                self._watch(source)
            # Again after arming: what was written in between raised no event.
            self._wake_grown(self._resting)
            self._resting.clear()
            return
        timeout = self._timeout(now)
        self._poll(timeout)
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
            sink.owner.spoke + (_HOLD_TERMINAL if sink.tty else _HOLD_PIPE)
            for sink in self.sinks.values()
            if sink.owner is not None and sink.ready and not sink.pending
        ]
        if self._ending is not None:
            times.append(self._ending.give_up_at)
        if self._wake_r < 0:
            times.append(now + self._poll_interval)
        for source in self.sources:
            if source.sink.dead or source.queued:
                continue
            if source.polled:
                times.append(now + self._poll_interval)
            if source.sink.tty and source.scanned:
                times.append(source.spoke + _SHOW_PARTIAL)
        return max(0.0, min(times) - now) if times else None

    def _wake_silent(self, now: float) -> None:
        """Queues what the clock, not an event, makes ready."""
        for source in self.sources:
            if source.queued or source.sink.dead:
                continue
            partial = source.sink.tty and source.scanned and now >= source.spoke + _SHOW_PARTIAL
            if partial or (source.polled and (source.fd < 0 or source.grew())):
                self._unwatch(source)
                self._queue(source)

    def _poll(self, timeout: float | None) -> None:
        assert self._watcher is not None
        waiting = poll()
        if self._wake_r >= 0:
            waiting.register(self._wake_r, POLLIN)
        if self._watcher.fd >= 0:
            waiting.register(self._watcher.fd, POLLIN)
        for sink in self.sinks.values():
            if sink.pending and sink.fd >= 0:
                waiting.register(sink.fd, POLLOUT)
        for fd, _events in waiting.poll(None if timeout is None else max(1, int(timeout * 1000))):
            if fd == self._wake_r:
                os.read(fd, 4096)
            elif fd == self._watcher.fd:
                fired, overflow = self._watcher.read()
                for source in tuple(self.sources) if overflow else self._fired(fired):
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

    # ---- the end of sources

    def finish_all(self, ending: Drain) -> None:
        """Lets every source end at its present size."""
        with self.cond:
            ending.sources.extend(s for s in self.sources if not s.done)
            for source in ending.sources:
                source.limit = source.on_disk()
                self._queue(source)
            ending.taken = True
            self._ending = ending
            self.on_done()
            self.cond.notify_all()

    def _keep_to_the_end(self, ending: Drain, now: float) -> None:
        with self.cond:
            if not ending.over and ending.give_up_at <= now:
                self.give_up(ending)
            if ending.over:
                self._ending = None
                self.on_done()
                self.cond.notify_all()

    def _settle(self) -> None:
        """Ends the sources whose last byte has left the sink."""
        still = []
        for source in self._finishing:
            if source.sink.pending_source is source:
                still.append(source)
            else:
                self.forget(source)
        self._finishing = still

    def forget(self, source: FollowedFile) -> None:
        """Ends one source, whatever state it is in."""
        sink = source.sink
        if sink.pending_source is source:
            sink.pending, sink.pending_source, sink.torn = [], None, True
        if source.queued:
            source.queued = False
            sink.ready.remove(source)
        self._resting.discard(source)
        self._unwatch(source)
        self.sources.discard(source)
        with self.cond:
            source.close()
            source.done = True
            self.on_done()
            self.cond.notify_all()
