"""`--log-rotate SIZE[:PARTS]`: moves the older part of a worker's log into files of its own, byte for byte.

    stdout.log.000000000000000   stdout.log.000000104857600   …   stdout.log      each part at most SIZE

The number of a part is the offset of its first byte in the whole output (`log_layout.WholeLog` reads that).
An empty last part marks that the workers have ended, and that the log begins there.

A worker's log is the worker's own descriptor: nothing can make it write elsewhere, and it must never wait. So
the older part is *copied* into the next part, and then its room is given back to the file system by punching
a hole into the log (`fallocate`). The log's length, and with it every offset into it, stays what it was:
writers append, followers read on. When the workers have ended, the log is replaced by what follows the hole,
so that `cat stdout.log.0* stdout.log` is the whole output.

Invariants
- A byte leaves the log only when the part that has it is complete and has its name; a kill at any moment
  leaves it in one place or, between the two steps, in both.
- What the console has not read yet is not moved: a stalled console delays rotation, and loses nothing.
- Parts end with a line, if one ends in their last 64 KiB.
- No call waits for the thread. It sleeps until a log grows, and then looks at most five times a second.
- A file system that cannot punch holes, or that is full, keeps its logs whole; that is reported once.

Rejected: copying and truncating, which loses what is written in between; pipes to the agent, which block or
kill a worker if the agent stalls or dies; collapsing the range instead of punching it, which few file systems
can do, and which moves every offset.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from select import POLLIN, poll
from typing import Any

from phalanx.agent.logs.inotify import Watcher
from phalanx.core.record import Record
from phalanx.log import warn
from phalanx.observe.log_layout import part_path

_PAUSE = 0.2  # seconds between two looks at a log that grows
_SEARCH = 64 * 1024  # bytes at the end of a part in which a line end is looked for
_PUNCH_AND_KEEP_SIZE = 0x2 | 0x1
_UNABLE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FINISH = 30.0  # seconds that the end of a job waits for parts on a slow disk

_running: set[threading.Thread] = set()


class Rotation(Record):
    """What `--log-rotate` asks for."""

    size: int
    keep: int | None = None  # parts besides the log itself; None: all


def wait_for_rotation() -> bool:
    """At the end of the launcher: let the rotation of logs finish; False if it did not in time."""
    end = time.monotonic() + _FINISH
    for thread in tuple(_running):
        thread.join(max(0.0, end - time.monotonic()))
    return not _running


class RotatedLog:
    """One log and its parts."""

    def __init__(self, path: str, rotation: Rotation) -> None:
        self.path = path
        self._size = rotation.size
        self._keep = rotation.keep
        self.start = 0  # bytes before it are in parts
        self._before = 0  # bytes of the output that the worker has since removed
        self._parts: list[str] = []
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def due(self) -> bool:
        """Whether the log is larger than it may be."""
        size = os.fstat(self.fd).st_size
        if size < self.start:  # the worker has emptied it
            self._before += self.start
            self.start = 0
        return size - self.start > self._size

    def move_front(self, limit: int) -> bool:
        """Move the next part out of the log, unless it goes beyond `limit`; False if nothing was moved."""
        end = self.start + self._size
        if end > limit or not self.due():
            return False
        end = self._line_end(end)
        part = part_path(self.path, self._before + self.start)
        self._copy(end, part)
        self._parts.append(part)
        punch(self.fd, self.start, end - self.start)
        self.start = end
        while self._keep is not None and len(self._parts) > self._keep:
            _unlink(self._parts.pop(0))
        return True

    def close_up(self) -> None:
        """The writers have ended: leave a log that begins with its first byte of data."""
        if self.start and not self.due():
            self._copy(os.fstat(self.fd).st_size, self.path)
            mark = part_path(self.path, self._before + self.start)
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def _line_end(self, end: int) -> int:
        begin = max(self.start, end - min(_SEARCH, self._size // 2))
        found = os.pread(self.fd, end - begin, begin).rfind(b"\n") + 1
        return begin + found if found else end

    def _copy(self, end: int, path: str) -> None:
        unfinished = f"{self.path}.new"
        _unlink(unfinished)
        # Exclusively: what a worker may have put there (a link, a pipe) is neither followed nor waited for.
        out = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            at = self.start
            while at < end:
                sent = os.sendfile(out, self.fd, at, end - at)
                if not sent:
                    raise OSError(errno.EIO, "the log became shorter", self.path)
                at += sent
        except BaseException:
            _unlink(unfinished)
            raise
        finally:
            os.close(out)
        os.rename(unfinished, path)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class LogRotation:
    """Rotates the logs of one start of the workers, in a thread of its own."""

    def __init__(self, paths: Iterable[str], rotation: Rotation, shown: Callable[[str], int | None]) -> None:
        """`shown`: up to where a log was read by what follows it; None if nothing does."""
        self._shown = shown
        self._logs = [RotatedLog(path, rotation) for path in sorted(set(paths))]
        self._wake_r, self._wake_w = os.pipe()
        self._lock = threading.Lock()
        self._over = False
        self._ended = False
        self._told = False
        self._thread = threading.Thread(target=self._main, name="log-rotation", daemon=True)

    def start(self) -> None:
        _running.add(self._thread)
        self._thread.start()

    def stop(self, ended: bool = True) -> None:
        """No more is rotated; returns at once, and the thread finishes its work. Idempotent.

        `ended`: the writers have; else the logs stay as they are, with their holes.
        """
        with self._lock:
            self._ended = ended
            if not self._over and self._wake_w >= 0:
                os.write(self._wake_w, b"!")
            self._over = True

    def _main(self) -> None:
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        watcher = Watcher()
        try:
            if self._can_punch():
                while not self._over:
                    self._sleep(watcher, self._rotate())
                if self._ended:
                    self._rotate(ended=True)
        except OSError as error:
            warn(f"--log-rotate: logs are not rotated any more: {error.filename or ''} {error.strerror}")
        finally:
            watcher.close()
            for log in self._logs:
                log.close()
            with self._lock:
                os.close(self._wake_r)
                os.close(self._wake_w)
                self._wake_r = self._wake_w = -1
            _running.discard(self._thread)

    def _can_punch(self) -> bool:
        for log in self._logs[:1]:
            try:
                punch(log.fd, 0, 0, probe=log.path)
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise
                where = os.path.dirname(log.path)
                warn(
                    f"--log-rotate: the file system of {where} cannot free a part of a file; logs stay whole"
                )
                return False
        return True

    def _rotate(self, ended: bool = False) -> bool:
        """Move what is due; whether something had to stay because it is not shown, or there is no room."""
        waiting = False
        for log in self._logs:
            try:
                while True:
                    shown = None if ended else self._shown(log.path)
                    if not log.move_front(os.fstat(log.fd).st_size if shown is None else shown):
                        break
                waiting = waiting or log.due()
                if ended:
                    log.close_up()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                waiting = True
                self._tell(
                    f"--log-rotate: no room for a part of {log.path}: {error.strerror}; it stays whole"
                )
        return waiting

    def _tell(self, line: str) -> None:
        if not self._told:
            self._told = True
            warn(line)

    def _sleep(self, watcher: Watcher, waiting: bool) -> None:
        """Until a log grows, then a little longer; with something `waiting`, only the little longer."""
        polled = waiting
        if not waiting:
            watches = [watcher.watch_file(log.fd, log.path) for log in self._logs]
            polled = min(watches, default=0) < 0
            if any(log.due() for log in self._logs):  # it grew before it was watched
                polled = True
            waits = poll()
            waits.register(self._wake_r, POLLIN)
            if watcher.fd >= 0:
                waits.register(watcher.fd, POLLIN)
            waits.poll(_PAUSE * 1000 if polled else None)
            watcher.read()
        pause = poll()
        pause.register(self._wake_r, POLLIN)
        pause.poll(_PAUSE * 1000)


def punch(fd: int, offset: int, length: int, probe: str = "") -> None:
    """Give the room of a range back; it reads as zeros, and the file keeps its length.

    `probe`: only find out whether that is possible, with a file beside this one.
    """
    if probe:
        path = f"{probe}.new"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"x")
            punch(fd, 0, 1)
        finally:
            os.close(fd)
            _unlink(path)
        return
    import ctypes

    libc: Any = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", None) or libc.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, _PUNCH_AND_KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
