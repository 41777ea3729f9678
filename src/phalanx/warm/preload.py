"""Preloads modules in the zygote, before it forks, so that the workers share one import.

Each rule is checked during the import, not promised by a list:
* Only installed packages and the standard library are preloaded. The user's own modules run in every worker;
  an installed package that imports one of them is skipped.
* A module that raises is skipped. A module spoils the zygote if it leaves a thread that a fork does not stop,
  opens a device or a socket, starts a process, hangs, kills the process, or reads a variable that differs
  between workers (RANK) during its import. The keeper then forks another zygote without that module.
* Fork-aware thread pools (OpenBLAS) end their threads at a fork; a trial fork distinguishes them from threads
  that would be lost.
* Effects of an import outside of memory are repeated in every worker: variables, printed text, and open files
  (with an offset of their own).

Progress is reported to the keeper line by line, so that it can name the module even after a crash:
`import NAME`, `drop NAME: why`, `spoiled NAME: why`, `done COUNT`.
"""

from __future__ import annotations

import os
import sys

from phalanx import kernel
from phalanx.warm.import_effects import ImportState, as_in_a_script
from phalanx.warm.import_recorder import homes as installed_in
from phalanx.warm.import_recorder import loads_code
from phalanx.warm.twin import Twin
from phalanx.warm.variables import NotedVariables, loaded_libraries, named_in_libraries, variables_set_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from phalanx.warm.generators import GeneratorPlan
    from phalanx.warm.import_values import ImportValues

SPOILED = 77  # the exit status of a zygote that must not be forked from

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/infiniband", "/dev/xpu")
_SHARED = ("socket:", "pipe:", "anon_inode:", "/memfd:")  # siblings would consume each other's data
_NEVER = frozenset({"__main__", "phalanx", "sitecustomize", "usercustomize", "antigravity", "this"})

# The variables that differ between workers (agent/environment.py).
_OF_A_WORKER = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
_OF_A_WORKER_PREFIXES = ("TORCHELASTIC_", "PHALANX_")


class ImportResidue:
    """Effects of the imports outside of memory, which `fork_setup` repeats in every worker."""

    def __init__(self) -> None:
        self.variables: dict[bytes, tuple[bytes | None, bytes | None]] = {}  # name → value before, and after
        self.printed: tuple[bytes, bytes] = (b"", b"")  # on stdout, on stderr
        self.files: dict[int, str] = {}  # descriptor → path
        self.read: dict[bytes, tuple[bytes | None, str]] = {}  # variable → its value, and the first reader
        self.values: ImportValues | None = None  # times and process numbers that modules have
        self.generators: GeneratorPlan | None = None


left = ImportResidue()


def preload(names: Iterable[str], report: Callable[[str], None]) -> None:
    """Import them in this order; exits if the zygote is spoiled.

    `names` may contain the recorder's other lines: variables that the script sets before the following
    imports, and modules that the script shadows.
    """
    import gc

    names = list(names)
    twin = Twin()
    count = _import_all(names, report if not twin.is_other else lambda _line: None)
    random, left.values, left.generators = twin.compare()
    if random:
        report(f"spoiled {random[0]}: has another value in every process (random, or a temporary name)")
        os._exit(SPOILED)
    gc.collect()
    gc.freeze()  # or a collection in a worker would write into every shared page
    report(f"done {count}")


def _import_all(names: list[str], report: Callable[[str], None]) -> int:
    hidden = _Hidden({name[1:] for name in names if name.startswith("!")})
    sys.meta_path.insert(0, hidden)

    homes = installed_in()
    verdicts: dict[str, bool] = {}
    console = _Console()
    fds = _descriptors()
    known = set(sys.modules)
    processes = set(kernel.children())
    count = 0
    own: dict[bytes, bytes | None] = {}  # variables that the script sets: their values before
    files = [name[1:] for name in names if name.startswith("=")]
    may_be_set = variables_set_in(files, files[0] if files else "")
    libraries = loaded_libraries() if may_be_set else set()
    surroundings = as_in_a_script()
    surroundings.__enter__()
    state = ImportState()
    for name in names:
        if name[:1] in ("+", "?"):
            if loads_code(name[1:].partition("=")[0]):
                break  # the recorder never writes one; what follows may depend on it
            _set_for_script(name[0], name[1:], own)
            continue
        top = name.partition(".")[0]
        if name in sys.modules or top in _NEVER or top in hidden.names or name.startswith("="):
            continue
        if top not in verdicts:
            verdicts[top] = _is_installed(top, homes)
        if not verdicts[top]:
            continue
        report(f"import {name}")
        with console:
            imported, asked, read = _import(name, report)
        if not imported and not hidden.asked:
            console.forget()
            continue
        count += 1
        now = _descriptors()
        why = (
            next((f"imports {one}, which a module of the script shadows" for one in hidden.asked), "")
            or _spoiled_by_threads()
            or next((f"reads {variable} during its import" for variable in asked), "")
            or _spoiled_by_descriptors(fds, now)
            or _spoiled_by_own_modules(sys.modules.keys() - known, homes)
            or ("starts a process" if set(kernel.children()) - processes else "")
            or state.changed()
            or next((f"reads {one}, which the script may set" for one in may_be_set if one in read), "")
        )
        if may_be_set and not why:
            now_loaded = loaded_libraries()
            found = named_in_libraries(may_be_set, now_loaded - libraries)
            why = f"may read {found}, which the script may set" if found else ""
            libraries = now_loaded
        for one, seen in read.items():
            left.read.setdefault(os.fsencode(one), (seen, name))
        if why:
            report(f"spoiled {name}: {why}")
            os._exit(SPOILED)
        known = set(sys.modules)
    surroundings.__exit__()
    for variable, value in own.items():
        _put(variable, value)
    sys.meta_path.remove(hidden)
    left.printed = console.printed()
    left.files = {int(fd): what for fd, what in _descriptors().items() if fd not in fds and _is_file(what)}
    return count


class _Hidden:
    """A finder that rejects the modules that the script shadows."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.names:
            self.asked.append(name)
            raise ImportError(name)  # at once: the zygote is spoiled anyway


class _Asked(NotedVariables):
    """The environment during an import: variables of a worker are missing, and access to them is noted."""

    def __init__(self, variables: dict[bytes, bytes]) -> None:
        super().__init__((name, value) for name, value in variables.items() if not _is_of_a_worker(name))
        self.asked: list[str] = []
        self.read = {}

    def __missing__(self, name: bytes) -> bytes:
        if _is_of_a_worker(name):
            self.asked.append(os.fsdecode(name))
        raise KeyError(name)


def _is_of_a_worker(name: bytes) -> bool:
    text = os.fsdecode(name)
    return text in _OF_A_WORKER or text.startswith(_OF_A_WORKER_PREFIXES)


def _import(name: str, report: Callable[[str], None]) -> tuple[bool, list[str], dict[str, bytes | None]]:
    """Whether the import succeeded, which variables of a worker it read, and which others, with values."""
    environ: Any = os.environ
    before: dict[bytes, bytes] = environ._data
    during = environ._data = _Asked(before)
    os.environb._data = during  # type: ignore[attr-defined]  # the two share it
    imported = False
    try:
        __import__(name)
        imported = True
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a module may do anything
        # An ImportError is not reported: optional imports are recorded as well.
        if not isinstance(error, ImportError):
            report(f"drop {name}: {type(error).__name__}")
    finally:
        environ._data = os.environb._data = before  # type: ignore[attr-defined]
        for key in sorted(before.keys() | during.keys()):
            old, new = before.get(key), dict.get(during, key)  # not noted
            if old != new and not (new is None and _is_of_a_worker(key)):
                # Undone for the following imports, which a worker may do first; repeated in every worker.
                _put(key, old)
                if imported:
                    left.variables[key] = (left.variables.get(key, (old, None))[0], new)
    return imported, during.asked, {os.fsdecode(key): value for key, value in during.read.items()}


def _put(name: bytes, value: bytes | None) -> None:
    if value is None:
        os.environb.pop(name, None)
        os.unsetenv(name)  # C code may have set it
    else:
        os.environb[name] = value


def _set_for_script(word: str, text: str, own: dict[bytes, bytes | None]) -> None:
    name, _, value = (part.encode("utf-8", "surrogateescape") for part in text.partition("="))
    if word == "?" and name in os.environb:
        return
    own.setdefault(name, os.environb.get(name))
    _put(name, value)


class _Console:
    """Captures what is printed while it is entered: every worker prints it to its own log."""

    def __init__(self) -> None:
        from phalanx.kernel import anonymous_file

        self._kept = [anonymous_file("phalanx-printed") for _ in (1, 2)]
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
        """Discard the output of the last import: the worker repeats it."""
        self._sizes = self._sizes_before
        for kept, size in zip(self._kept, self._sizes, strict=True):
            os.truncate(kept, size)
            os.lseek(kept, size, os.SEEK_SET)

    def printed(self) -> tuple[bytes, bytes]:
        out, err = (os.pread(kept, 1 << 20, 0) for kept in self._kept)
        for kept in self._kept:
            os.close(kept)
        return out, err

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                pass  # missing, or closed by an import


def _copy(fd: int) -> int | None:
    try:
        return os.dup(fd)
    except OSError:  # it was closed at the start
        return None


def _is_installed(top: str, homes: tuple[str, ...]) -> bool:
    if top in sys.builtin_module_names:
        return True
    from importlib.machinery import PathFinder

    try:
        spec = PathFinder.find_spec(top)
    except Exception:  # noqa: BLE001 - a third-party import hook
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return bool(places) and all(place is not None and place.startswith(homes) for place in places)


def _spoiled_by_threads() -> str:
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


def _spoiled_by_descriptors(before: dict[str, str], now: dict[str, str]) -> str:
    for fd, what in now.items():
        if fd not in before and (what.startswith((*_DEVICES, *_SHARED)) or what.endswith(" (deleted)")):
            return f"opens {what}"
    return ""


def _is_file(what: str) -> bool:
    return what.startswith("/") and os.path.isfile(what)


def _spoiled_by_own_modules(names: Iterable[str], homes: tuple[str, ...]) -> str:
    """A user's plug-in that a package finds by itself: later edits to it would have no effect."""
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
