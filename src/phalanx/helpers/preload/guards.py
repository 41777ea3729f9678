"""What an import leaves behind that does not suit a fork; looked for after each package of a preload.

The packages were proven before (packages.py). The guards are for what the proof could not see: a newer
version, a plug-in, a package that the user names. A guard is a function that returns in a few words
("opens socket:[123]") what it found since its last call, or nothing.
"""

from __future__ import annotations

import os
import random
import sys

from phalanx import kernel
from phalanx.helpers.preload.import_effects import ImportState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Guard = Callable[[], str]

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/infiniband", "/dev/xpu")
_OURS = ("phalanx", "setproctitle")  # wherever they are installed
_SHARED = ("socket:", "pipe:", "anon_inode:", "/memfd:")  # siblings would consume each other's data


def guards(homes: tuple[str, ...]) -> list[Guard]:
    """All of them, with this moment as the state to compare with; `homes`: where packages are installed."""
    return [
        ImportState().changed,
        _Modules(homes),
        _Threads(),
        _OpenFiles(),
        _SharedMaps(),
        _Processes(),
        _RandomState(),
    ]


class _Threads:
    """A thread that a fork does not end: it would be missing in the workers.

    Fork-aware thread pools (OpenBLAS) end their threads at a fork; a trial fork distinguishes them.
    """

    def __init__(self) -> None:
        self._known = _count_threads()

    def __call__(self) -> str:
        if _count_threads() <= self._known:
            return ""
        import warnings

        with warnings.catch_warnings():  # newer versions of Python warn of a fork beside threads
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        before, self._known = self._known, max(self._known, _count_threads())
        more = self._known - before
        return f"leaves {more} thread{'s' * (more > 1)} running" if more > 0 else ""


def _count_threads() -> int:
    """Of this process."""
    try:
        return os.stat("/proc/self/task").st_nlink - 2
    except OSError:
        import threading

        return threading.active_count()


class _OpenFiles:
    """A device, or something that siblings would share; plain files are opened again in every worker."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self()

    def __call__(self) -> str:
        now = _numbers()
        found = ""
        for fd in now - self._known:
            try:
                what = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                now.remove(fd)  # that of the listing: another file may get this number
                continue
            if what.startswith((*_DEVICES, *_SHARED)) or what.endswith(" (deleted)"):
                found = found or f"opens {what}"
        self._known = now
        return found


def _numbers() -> set[str]:
    try:
        return set(os.listdir("/proc/self/fd"))
    except OSError:
        return set()


class _SharedMaps:
    """Memory that a fork does not copy: what one worker writes there, its siblings read."""

    def __init__(self) -> None:
        self._known = shared_maps()

    def __call__(self) -> str:
        before, self._known = self._known, shared_maps()
        return next(
            (f"maps {what} for all forks" for one, what in self._known.items() if one not in before), ""
        )


def shared_maps() -> dict[str, str]:
    """Device and inode of memory that is written to and shared, and its name."""
    fields = [line.split(None, 5) for line in kernel.read_text("/proc/self/maps").splitlines()]
    return {f"{one[3]} {one[4]}": one[-1] for one in fields if one[1][1] == "w" and one[1][3] == "s"}


class _Processes:
    """A process that was started."""

    def __init__(self) -> None:
        self._known = set(kernel.children())

    def __call__(self) -> str:
        now = set(kernel.children())
        new, self._known = now - self._known, now
        return "starts a process" if new else ""


class _Modules:
    """A module that is not an installed one, however it was found: it may be edited at any time."""

    def __init__(self, homes: tuple[str, ...]) -> None:
        self._homes = homes
        self._known = set(sys.modules)

    def __call__(self) -> str:
        new = sys.modules.keys() - self._known
        self._known |= new
        for name in new:
            spec: Any = getattr(sys.modules[name], "__dict__", {}).get("__spec__")
            place = spec.origin if getattr(spec, "has_location", False) else None
            if name.partition(".")[0] in _OURS or not isinstance(place, str) or not os.path.isabs(place):
                continue
            if not place.startswith(self._homes):
                return f"imports {name} from {os.path.dirname(place)}"
        return ""


class _RandomState:
    """Python seeds this generator again in a fork, also where an import has seeded it with a constant."""

    def __init__(self) -> None:
        self._known = random.getstate()

    def __call__(self) -> str:
        before, self._known = self._known, random.getstate()
        return "uses the random generator of Python" if self._known != before else ""
