"""Imports in the zygote, before it forks: what the workers would all import anyway, done once.

Rules, each checked while it happens and not promised by a list:
* Only installed packages and the standard library. The user's own modules are executed fresh in every
  worker, whatever their names; an installed package that imports one of them is left out as well.
* A module that raises is left out. One that leaves a thread which a fork does not stop, opens a device
  or a socket, starts a process, hangs, or kills the process, spoils this zygote: the keeper forks another
  one, without it. So does one that asks, while it is imported, for a variable that each worker has its own
  value of (RANK): all of them would find what it made of the zygote's.
* Threads are judged by evidence: pools that know about fork (OpenBLAS) end their threads when the
  process forks, so a trial fork tells them from threads that would be lost without anybody noticing.
* What an import leaves behind outside of memory is given to every worker, as if it had imported the module
  itself: variables it set, what it printed, files it keeps open (each worker with an offset of its own).

What happens is told to the keeper line by line, so that it knows the culprit even of a crash:
`import NAME`, `drop NAME: why`, `spoiled NAME: why`, `done COUNT`.
"""

from __future__ import annotations

import os
import sys

from phalanx.warm.import_recorder import homes as installed_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

SPOILED = 77  # the exit status of a zygote that must not be forked from

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/infiniband", "/dev/xpu")
_SHARED = ("socket:", "pipe:", "anon_inode:", "/memfd:")  # siblings would take each other's news from these
_NEVER = frozenset({"__main__", "phalanx", "sitecustomize", "usercustomize", "antigravity", "this"})

# What agents give each worker a value of its own of (agent/environment.py).
_OF_A_WORKER = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
_OF_A_WORKER_TOO = ("TORCHELASTIC_", "PHALANX_")


class ImportResidue:
    """What the imports left behind, for `forked.tidy` to give to every worker."""

    def __init__(self) -> None:
        self.variables: dict[bytes, tuple[bytes | None, bytes | None]] = {}  # name → value before, and after
        self.said: tuple[bytes, bytes] = (b"", b"")  # on stdout, on stderr
        self.files: dict[int, str] = {}  # descriptor → path


left = ImportResidue()


def preload(names: Iterable[str], tell: Callable[[str], None]) -> None:
    """Import them, in this order; ends the process when it is spoiled.

    Among them other lines of a recorder: variables that the script sets before the imports behind them, and
    the names of modules that the script has its own of.
    """
    import gc

    names = list(names)
    hidden = _Hidden({name[1:] for name in names if name.startswith("!")})
    sys.meta_path.insert(0, hidden)

    homes = installed_in()
    verdicts: dict[str, bool] = {}
    console = _Console()
    fds = _descriptors()
    known = set(sys.modules)
    count = 0
    own: dict[bytes, bytes | None] = {}  # what the script sets: the values to go back to
    for name in names:
        if name[:1] in ("+", "?"):
            _set_for_script(name[0], name[1:], own)
            continue
        top = name.partition(".")[0]
        if name in sys.modules or top in _NEVER or top in hidden.names:
            continue
        if top not in verdicts:
            verdicts[top] = _is_installed(top, homes)
        if not verdicts[top]:
            continue
        tell(f"import {name}")
        with console:
            imported, asked = _import(name, tell)
        if not imported and not hidden.asked:
            console.forget()
            continue
        count += 1
        now = _descriptors()
        why = (
            next((f"imports {one}, which a module of the script's own hides" for one in hidden.asked), "")
            or _spoilt_by_threads()
            or next((f"reads {variable} when it is imported" for variable in asked), "")
            or _spoilt_by_descriptors(fds, now)
            or _spoilt_by_own_modules(sys.modules.keys() - known, homes)
            or _spoilt_by_processes()
        )
        if why:
            tell(f"spoiled {name}: {why}")
            os._exit(SPOILED)
        known = set(sys.modules)
    for variable, value in own.items():
        _put(variable, value)
    sys.meta_path.remove(hidden)
    left.said = console.said()
    left.files = {int(fd): what for fd, what in _descriptors().items() if fd not in fds and _is_file(what)}
    gc.collect()
    gc.freeze()  # a collection in a worker would write into every shared page otherwise
    tell(f"done {count}")


class _Hidden:
    """A finder that finds nothing: it refuses what is going to be another module in the worker."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.names:
            self.asked.append(name)
            raise ImportError(name)  # early: nothing that comes of it is going to be used


class _Asked(dict[bytes, bytes]):
    """The variables during an import. Those of a worker are not there, and it is noted who asks for them."""

    def __init__(self, variables: dict[bytes, bytes]) -> None:
        super().__init__((name, value) for name, value in variables.items() if not _is_of_a_worker(name))
        self.asked: list[str] = []

    def __missing__(self, name: bytes) -> bytes:
        if _is_of_a_worker(name):
            self.asked.append(os.fsdecode(name))
        raise KeyError(name)


def _is_of_a_worker(name: bytes) -> bool:
    text = os.fsdecode(name)
    return text in _OF_A_WORKER or text.startswith(_OF_A_WORKER_TOO)


def _import(name: str, tell: Callable[[str], None]) -> tuple[bool, list[str]]:
    """Whether it could be imported, and which variables of a worker it asked for."""
    environ: Any = os.environ
    before: dict[bytes, bytes] = environ._data
    during = environ._data = _Asked(before)
    os.environb._data = during  # type: ignore[attr-defined]  # the two share it
    imported = False
    try:
        __import__(name)
        imported = True
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a module may do anything
        # What cannot be imported is no news: optional imports are recorded as well.
        if not isinstance(error, ImportError):
            tell(f"drop {name}: {type(error).__name__}")
    finally:
        environ._data = os.environb._data = before  # type: ignore[attr-defined]
        for key in sorted(before.keys() | during.keys()):
            old, new = before.get(key), during.get(key)
            if old != new and not (new is None and _is_of_a_worker(key)):
                # Not for the next imports, which a worker may do before this one, but for every worker.
                _put(key, old)
                if imported:
                    left.variables[key] = (left.variables.get(key, (old, None))[0], new)
    return imported, during.asked


def _put(name: bytes, value: bytes | None) -> None:
    if value is None:
        os.environb.pop(name, None)
        os.unsetenv(name)  # for what was set behind our back
    else:
        os.environb[name] = value


def _set_for_script(word: str, text: str, own: dict[bytes, bytes | None]) -> None:
    name, _, value = (part.encode("utf-8", "surrogateescape") for part in text.partition("="))
    if word == "?" and name in os.environb:
        return
    own.setdefault(name, os.environb.get(name))
    _put(name, value)


class _Console:
    """Keeps what is printed while it is entered: every worker is to say it, in its own log."""

    def __init__(self) -> None:
        from phalanx.kernel import anonymous_file

        self._kept = [anonymous_file("phalanx-said") for _ in (1, 2)]
        self._sizes = [0, 0]

    def __enter__(self) -> None:
        self._flush()
        self._before = [_copy(fd) for fd in (1, 2)]
        for fd, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, fd)

    def __exit__(self, *error: object) -> None:
        self._flush()
        for fd, before in zip((1, 2), self._before, strict=True):
            if before is None:
                os.close(fd)
            else:
                os.dup2(before, fd)
                os.close(before)
        self._sizes_before, self._sizes = self._sizes, [os.fstat(kept).st_size for kept in self._kept]

    def forget(self) -> None:
        """What the last one said: the worker is going to import it again, and to hear it again."""
        self._sizes = self._sizes_before
        for kept, size in zip(self._kept, self._sizes, strict=True):
            os.truncate(kept, size)
            os.lseek(kept, size, os.SEEK_SET)

    def said(self) -> tuple[bytes, bytes]:
        out, err = (os.pread(kept, 1 << 20, 0) for kept in self._kept)
        for kept in self._kept:
            os.close(kept)
        return out, err

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                pass  # none, or closed by an import


def _copy(fd: int) -> int | None:
    try:
        return os.dup(fd)
    except OSError:  # started with it closed
        return None


def _is_installed(top: str, homes: tuple[str, ...]) -> bool:
    if top in sys.builtin_module_names:
        return True
    from importlib.machinery import PathFinder

    try:
        spec = PathFinder.find_spec(top)
    except Exception:  # noqa: BLE001 - an import hook of somebody's
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return bool(places) and all(place is not None and place.startswith(homes) for place in places)


def _spoilt_by_threads() -> str:
    if _threads() <= 1:
        return ""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    more = _threads() - 1
    return f"leaves {more} thread{'s' * (more > 1)} running" if more > 0 else ""


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def _descriptors() -> dict[str, str]:
    found = {}
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for fd in entries:
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return found


def _spoilt_by_descriptors(before: dict[str, str], now: dict[str, str]) -> str:
    for fd, what in now.items():
        if fd not in before and (what.startswith((*_DEVICES, *_SHARED)) or what.endswith(" (deleted)")):
            return f"opens {what}"
    return ""


def _is_file(what: str) -> bool:
    return what.startswith("/") and os.path.isfile(what)


def _spoilt_by_own_modules(names: Iterable[str], homes: tuple[str, ...]) -> str:
    """A plug-in of the user's that a package finds by itself: edits to it would not be seen."""
    for name in names:
        spec: Any = getattr(sys.modules.get(name), "__dict__", {}).get("__spec__")
        place = spec.origin if getattr(spec, "has_location", False) else None
        if (
            isinstance(place, str)
            and os.path.isabs(place)
            and not place.startswith(homes)
            and name.partition(".")[0] not in _NEVER
        ):
            return f"imports {name} from {os.path.dirname(place)}, which is not an installed package"
    return ""


def _spoilt_by_processes() -> str:
    from phalanx import kernel

    return "starts a process" if kernel.children() else ""
