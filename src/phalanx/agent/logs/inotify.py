"""Events for changed files (Linux inotify through ctypes).

Invariants
- A file watch is one-shot: it fires once when the file grows, and is then gone. Copying the output of a
  fast writer therefore costs that writer nothing; a lasting watch would queue one event per `write`.
- A lack of resources does not raise. Where inotify is not available (macOS, no instances or watches left),
  `watch_*` returns -1 and the caller polls the file.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_IN_MODIFY = 0x2
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE_SELF = 0x400
_IN_Q_OVERFLOW = 0x4000
_IN_ONESHOT = 0x80000000
_IN_NONBLOCK = 0o4000
_IN_CLOEXEC = 0o2000000

_HEADER = struct.Struct("iIII")  # wd, mask, cookie, length of the name that follows
_READ_SIZE = 65536


class Watcher:
    """One inotify instance; `fd` becomes readable on a change, and is -1 if inotify is not available."""

    def __init__(self) -> None:
        self.fd = -1
        self._add: Callable[[int, bytes, int], int] | None = None
        self._remove: Callable[[int, int], int] | None = None
        try:
            # Imported here: ctypes takes milliseconds, and only a run that follows files needs it.
            import ctypes

            libc: Any = ctypes.CDLL(None)
            init, add, remove = libc.inotify_init1, libc.inotify_add_watch, libc.inotify_rm_watch
            add.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
            self.fd = int(init(_IN_NONBLOCK | _IN_CLOEXEC))
            if self.fd >= 0:
                self._add, self._remove = add, remove
        except (ImportError, OSError, AttributeError):
            pass  # not available on this platform

    def watch_file(self, fd: int, path: str) -> int:
        """Arms a one-shot watch for growth of the open file `fd`; the watch number, or -1."""
        # By descriptor first: a path may by now name another file, or none.
        wd = self._watch(f"/proc/self/fd/{fd}", _IN_MODIFY | _IN_ONESHOT)
        return wd if wd >= 0 else self._watch(path, _IN_MODIFY | _IN_ONESHOT)

    def watch_dir(self, path: str) -> int:
        """Watches a directory for new names until `unwatch`; the watch number, or -1."""
        return self._watch(path, _IN_CREATE | _IN_MOVED_TO | _IN_DELETE_SELF)

    def unwatch(self, wd: int) -> None:
        """Removes a watch; one that has fired or vanished is not an error."""
        if self._remove is not None and wd >= 0:
            self._remove(self.fd, wd)

    def read(self) -> tuple[set[int], bool]:
        """The watches that fired, and whether events were lost (then any file may have changed)."""
        fired: set[int] = set()
        overflow = False
        while self.fd >= 0:
            try:
                data = os.read(self.fd, _READ_SIZE)
            except (BlockingIOError, InterruptedError):
                break
            at = 0
            while at < len(data):
                wd, mask, _cookie, length = _HEADER.unpack_from(data, at)
                at += _HEADER.size + length
                if mask & _IN_Q_OVERFLOW:
                    overflow = True
                else:
                    fired.add(wd)
            if len(data) < _READ_SIZE // 2:
                break
        return fired, overflow

    def close(self) -> None:
        """Frees the instance and all its watches."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
        self._add = self._remove = None

    def _watch(self, path: str, mask: int) -> int:
        if self._add is None:
            return -1
        return int(self._add(self.fd, os.fsencode(path), mask))
