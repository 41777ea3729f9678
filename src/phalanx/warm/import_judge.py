"""Watches imports from the inside, and finds the modules that do not suit a fork.

Every check is made when the body of a module has been executed, and before the bodies of modules that it
imports. So what a check finds belongs to the module that is being executed: the innermost one is to blame,
and not the package that happens to import it first. The modules whose bodies are being executed around it
import it, and are unsuitable with it: to hide it from them would make it look as if it were not installed.

Which modules import one that is loaded already is noted only after the first unsuitable module was found:
until then no one can, and this process may still become the zygote, in which `__import__` stays Python's own.

A check is a function that gets the name of the module, and returns in a few words ("opens socket:[123]") why
it does not suit a fork, or nothing. It compares with what it saw the last time. `checks()` makes all of them.
"""

from __future__ import annotations

import builtins
import os
import sys
from _thread import get_ident

from phalanx import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx.warm.verdict_log import VerdictLog

    Check = Callable[[str], str]

# Frames of this file count as importlib's own for tracebacks and for the stacklevel of warnings.
_FILE = "<frozen importlib._bootstrap>"
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/infiniband", "/dev/xpu")
_SHARED = ("socket:", "pipe:", "anon_inode:", "/memfd:")  # siblings would consume each other's data


class ImportJudge:
    """Installed around all imports of a preload."""

    def __init__(
        self,
        log: VerdictLog,
        homes: tuple[str, ...],
        checks: Sequence[Check],
        forbidden: Callable[[str], str | None],
        spoiled: Callable[[], None],
        progress: Callable[[], None],
    ) -> None:
        """`forbidden`: why a module must not be loaded here; None: it may. `spoiled`: one was blamed."""
        self._log = log
        self._homes = homes
        self._checks = checks
        self._forbidden = forbidden
        self._spoiled = spoiled
        self._progress = progress
        self._stack: list[str] = []
        self.each_module = True  # False: only those that are forbidden are noticed
        self.logs = True  # what is being executed
        self._machinery: Any = sys.modules["_frozen_importlib"]
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        load, ident, main = self._machinery._load_unlocked, get_ident, get_ident()
        begin, end = self._begin, self._end

        def _load_unlocked(spec: Any) -> Any:
            if ident() != main:  # a thread of an unsuitable module
                return load(spec)
            begin(spec.name)
            try:
                return load(spec)
            finally:
                end(spec.name)

        self._patch(self._machinery, "_load_unlocked", _load_unlocked)

    def __exit__(self, *error: object) -> None:
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()

    def _patch(self, owner: Any, name: str, function: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        function.__code__ = function.__code__.replace(co_filename=_FILE)
        setattr(owner, name, function)

    def note_importers(self) -> None:
        """From now on, also note who imports an unsuitable module that is loaded already."""
        imports, gcd, met = builtins.__import__, self._machinery._gcd_import, self._imported

        def __import__(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            met(name, globals, fromlist, level)
            return imports(name, globals, locals, fromlist, level)

        def _gcd_import(name: str, package: Any = None, level: int = 0) -> Any:
            met(name, {"__package__": package}, (), level)
            return gcd(name, package, level)

        self._patch(builtins, "__import__", __import__)
        self._patch(self._machinery, "_gcd_import", _gcd_import)

    # -- events of the import system ----------------------------------------------------------------

    def _begin(self, name: str) -> None:
        """A module is about to be loaded; packages also look for some that they do not load."""
        forbidden = self._forbidden(name)
        if forbidden is not None:
            self._blame(name, forbidden)
        if not self.each_module:
            return
        if self._stack:
            why = self.look(self._stack[-1])
            if why:
                self._blame(self._stack[-1], why)
        self._stack.append(name)
        if self.logs:
            self._log.write(f"( {name}")
        self._progress()

    def _end(self, name: str) -> None:
        if not self.each_module:
            return
        why = self.look(name)
        self._stack.pop()
        own = self._own_place(name)
        if own and self._stack:
            self._blame(self._stack[-1], f"imports {name} from {own}, which is not an installed package")
        elif why:
            self._blame(name, why)
        if self.logs:
            self._log.write(")")

    def look(self, name: str = "") -> str:
        """Make all checks: what this module left that does not suit a fork."""
        found = [check(name) for check in self._checks]  # all: each remembers what it saw
        return next(filter(None, found), "")

    def _own_place(self, name: str) -> str:
        """The directory of a user's plug-in that a package finds by itself: it may be edited at any time."""
        spec: Any = getattr(sys.modules.get(name), "__dict__", {}).get("__spec__")
        place = spec.origin if getattr(spec, "has_location", False) else None
        if not isinstance(place, str) or not os.path.isabs(place) or place.startswith(self._homes):
            return ""
        return "" if name.partition(".")[0] in ("phalanx", "setproctitle") else os.path.dirname(place)

    def _imported(self, name: str, space: Any, fromlist: Any, level: int) -> None:
        if not self._stack or not isinstance(name, str):
            return
        try:
            if level:
                package = space.get("__package__") or space["__name__"]
                name = self._machinery._resolve_name(name, package, level)
            names = [name, *(f"{name}.{part}" for part in fromlist or ())]
        except (AttributeError, KeyError, TypeError, ImportError):
            return  # an error of the importer, which it is about to see
        for one in names:
            while one:
                if one in self._log.unsuitable or one in self._log.importers:
                    self._log.blame(one, "", self._stack)
                one = one.rpartition(".")[0]

    def _blame(self, name: str, why: str) -> None:
        self._log.blame(name, why, self._stack)
        self._spoiled()


# ---- what does not suit a fork -------------------------------------------------------------------


def checks(variables: Callable[[], list[str]]) -> list[Check]:
    """All checks, with this moment as the state to compare with.

    `variables`: those of a worker that were read since it was called the last time.
    """
    all_of_them: list[Check] = [_Threads(), _variables_check(variables), _OpenFiles(), _Processes()]
    if not _has_gil():
        all_of_them.append(_gil_check())
    return all_of_them


class _Threads:
    """A thread that a fork does not end: it would be missing in the workers.

    Fork-aware thread pools (OpenBLAS) end their threads at a fork; a trial fork distinguishes them.
    """

    def __init__(self) -> None:
        self._known = count_threads()

    def __call__(self, name: str) -> str:
        if count_threads() <= self._known:
            return ""
        child = fork_silently()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        before, self._known = self._known, max(self._known, count_threads())
        more = self._known - before
        return f"leaves {more} thread{'s' * (more > 1)} running" if more > 0 else ""


def count_threads() -> int:
    """Of this process."""
    try:
        return os.stat("/proc/self/task").st_nlink - 2
    except OSError:
        import threading

        return threading.active_count()


def fork_silently() -> int:
    """Newer versions of Python warn of a fork beside threads; this child runs nothing."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def _variables_check(read: Callable[[], list[str]]) -> Check:
    def check(name: str) -> str:
        return next((f"reads {variable} during its import" for variable in read()), "")

    return check


def _has_gil() -> bool:
    """False in a free-threaded interpreter, until a module that needs the lock turns it on for good."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def _gil_check() -> Check:
    """In a fork the lock would be on from the first line, and not from the import of that module on."""
    told = False

    def check(name: str) -> str:
        nonlocal told
        if told or not _has_gil():
            return ""
        told = True
        return "turns the GIL on"

    return check


class _OpenFiles:
    """A device, or something that siblings would share; plain files are opened again in every worker."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self("")

    def __call__(self, name: str) -> str:
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


class _Processes:
    """A process that was started."""

    def __init__(self) -> None:
        self._known = set(kernel.children())

    def __call__(self, name: str) -> str:
        now = set(kernel.children())
        new, self._known = now - self._known, now
        return "starts a process" if new else ""
