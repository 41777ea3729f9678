"""Imports the packages of a list in the zygote, before it forks, so that the workers share one import.

What is imported was chosen before (preload_list.py): modules of packages that were proven not to differ, in a
fork, from an import of the worker's own. While it happens,

* nothing else is imported: a package that is not on the list, one that this script must not find here, or a
  module that is not an installed one;
* what suits no fork is looked for after each package (guards.py);
* a use of a variable that differs between workers (RANK), or that the user's code may set, is noticed, and
  so is a read of sys.argv, and text that the script itself might have filtered.

At the first of these the zygote gives up: the keeper forks one that imports nothing, and the package is left
to the workers from then on.

Effects of an import outside of memory are repeated in every worker: variables, printed text, and open files
(with an offset of their own); so are values that every process makes anew (renewal.py).

The keeper gets an empty line now and then while modules are imported, and `done` at the end.
"""

from __future__ import annotations

import os
import sys
import time

from phalanx.helpers.preload.guards import guards
from phalanx.helpers.preload.import_effects import as_in_a_script
from phalanx.helpers.preload.import_recorder import homes as installed_in
from phalanx.helpers.preload.import_recorder import loads_code
from phalanx.helpers.preload.packages import GOES_THROUGH_ALL, PACKAGES
from phalanx.helpers.preload.preload_list import NOT_LISTED, is_listed, left_out, names_in, package_of
from phalanx.helpers.preload.preload_log import ImportGate
from phalanx.helpers.preload.renewal import Renewal
from phalanx.helpers.preload.variables import constants_in, lines_of, variables_set_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, NoReturn

    from phalanx.helpers.preload.guards import Guard
    from phalanx.helpers.preload.preload_log import PreloadLog

    Variables = dict[bytes, bytes]

_MAY_SET = ", which your code may set,"
SPOILED = 77  # the exit status of a process that must not become the zygote

# A module may warn the one that imports it: such a warning must not be taken for the script's.
_IMPORTER = "<preload>"
_IMPORT = compile("__import__(name, fromlist=parts)", _IMPORTER, "exec")

_REPORT_AFTER = 0.5  # seconds: the keeper need not wake up for every module

# The variables that differ between workers (agent/workers/environment.py).
_OF_A_WORKER = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
_OF_A_WORKER_PREFIXES = ("TORCHELASTIC_", "PHALANX_")
_HAND_ON = ("subprocess", "ctypes", "uuid")  # copy all variables for a process that they start


class ImportResidue:
    """Effects of the imports outside of memory, which `fork_setup` repeats in every worker."""

    def __init__(self) -> None:
        self.variables: dict[bytes, tuple[bytes | None, bytes | None]] = {}  # name → value before, and after
        self.printed: tuple[bytes, bytes] = (b"", b"")  # on stdout, on stderr
        self.files: dict[int, str] = {}  # descriptor → path
        self.renewal = Renewal(())


left = ImportResidue()


def preload(lines: Iterable[str], log: PreloadLog, report: Callable[[str], None]) -> None:
    """Import the entries, in this order. Does not return if one of them does not suit a fork.

    An entry is a line of leading_imports.py. Besides:

    *NAME       a module that the user names: it may import what it likes
    &NAME       one that a worker imported later on: left out if it reads what the user's code may set
    =PATH       a file of that code
    ~NAME       a variable that the code may have set before the entries that follow; ~*: any
    #           what is printed from here on may be filtered by the script
    !PACKAGE    must not be imported here
    -NAME       a module beside the script: must not even be looked for; -NAME/: a directory, which is a
                package where none of that name is installed
    """
    import gc

    before = gc.get_threshold()
    # One collection at the end is cheaper than those during the imports.
    gc.set_threshold(1 << 30, *before[1:])
    Preload(list(lines), log, report).run()
    gc.set_threshold(*before)  # a package that sets its own is not preloaded
    gc.collect()
    gc.freeze()  # or a collection in a worker would write into every shared page
    report("done")


class Preload:
    """One pass over a list."""

    def __init__(self, lines: list[str], log: PreloadLog, report: Callable[[str], None]) -> None:
        self._entries = _choose(lines)
        self._chosen = {package_of(name) for name in names_in(line for line in lines if line[:1] == "*")}
        self._refused = {line[1:] for line in lines if line.startswith("!")}
        self._beside = {line[1:] for line in lines if line.startswith("-")}
        self._may_be_set: set[bytes] = set()
        self._log = log
        self._gate = ImportGate(log.fd)
        self._report = report
        self._homes = installed_in()
        self._own: dict[bytes, bytes | None] = {}  # variables that the script sets: their values before
        self._asked: list[str] = []  # what an import must not do: "reads RANK"
        self._package = ""  # that is being imported
        self._is_users_choice = False
        self._is_filtered = False  # what is printed
        self._console = _Console()
        self._fds = _descriptors()
        self._guards: list[Guard] = []
        self._began = self._reported = time.monotonic()

    def run(self) -> None:
        """Import all of it."""
        own = sys.path.pop(0)  # of this package
        at_first = dict(os.environb)
        with as_in_a_script(self._asked):
            self._guards = guards(self._homes)  # with the settings of a script
            sys.meta_path.insert(0, self)
            for line in self._entries:
                if line == "#":
                    self._is_filtered = True
                elif line.startswith("~"):
                    self._may_be_set.add(os.fsencode(line[1:]))
                elif line[:1] in ("+", "?"):
                    if loads_code(line[1:].partition("=")[0]):
                        break  # leading_imports.py never names one; what follows may depend on it
                    _set_for_script(line[0], line[1:], self._own)
                else:
                    self._entry(line)
            self._look()
            sys.meta_path.remove(self)
        sys.path.insert(0, own)
        for variable, value in self._own.items():
            _put(variable, value)
        for variable, old, new in _differences(at_first, dict(os.environb)):
            left.variables[variable] = old, new
            _put(variable, old)
        left.printed = self._console.printed()
        left.files = {
            int(fd): what
            for fd, what in _descriptors().items()
            if fd not in self._fds and os.path.isfile(what)
        }
        left.renewal = Renewal(
            line for name, row in PACKAGES.items() if name in sys.modules for line in row[2]
        )
        self._log.write(" ".join(["loaded", *(name for name in sys.modules if name.isprintable())]))
        self._log.write(f"ready {time.monotonic() - self._began:.3f}")

    def _entry(self, line: str) -> None:
        users, line = line.startswith("*"), line.removeprefix("*")
        name, _, parts = line.partition(":")
        package = package_of(name)
        top = name.partition(".")[0]
        is_installed = top in sys.builtin_module_names or _place(top, None).startswith(self._homes)
        if (name in sys.modules and not parts) or not is_installed:
            return
        if package != self._package:
            self._look()
        self._package, self._is_users_choice = package, users
        self._log.write(f"import {line}")
        with self._console as printed:
            error = self._import(name, tuple(parts.split(",")) if parts else ())
        if b"".join(printed) and (self._is_filtered or _IMPORTER.encode() in printed[1]):
            self._refuse(package, "prints while it is imported, which the script may filter")
        if self._asked:
            depends = self._asked[0].endswith(_MAY_SET)
            self._refuse(package, f"{self._asked[0]} while it is imported", for_all=not depends)
        if error is not None and not isinstance(error, ImportError):  # optional ones are recorded, too
            self._refuse(package, f"raises {type(error).__name__}")

    def _look(self) -> None:
        """Whether the last package left anything that does not suit a fork."""
        found = [guard() for guard in self._guards]  # all: each remembers what it saw
        why = next(filter(None, found), "")
        if why and self._package:
            self._refuse(self._package, why, for_all=True)

    def _refuse(self, package: str, why: str, for_all: bool = False) -> NoReturn:
        self._log.refuse(package, why, for_all)
        os._exit(SPOILED)

    # -- as a finder: the first that is asked ---------------------------------------------------------

    def find_spec(self, name: str, path: Any = None, target: object = None) -> None:
        """Refuse what must not be imported here."""
        package = package_of(name)
        if not self._is_users_choice and (
            name in self._beside or (f"{name}/" in self._beside and not _place(name, path))
        ):
            self._refuse(self._package, f"looks for {name}, which is there beside the script")
        # Packages look for others (importlib.util.find_spec) without importing them.
        if sys._getframe(2).f_code.co_name != "_find_and_load_unlocked":
            return
        self._gate.wait(lambda: self._report(""))
        now = time.monotonic()
        if now - self._reported >= _REPORT_AFTER:
            self._reported = now
            self._report("")
        if name != package or self._is_users_choice:
            return
        if package in self._refused:
            self._refuse(self._package, f"imports {package}, which is left to the workers")
        if name.partition(".")[0] in sys.stdlib_module_names:
            return
        place = _place(name, path)
        if place and not place.startswith(self._homes):
            self._refuse(self._package, f"imports {package} from {os.path.dirname(place)}")
        if place and not is_listed(name) and not _is_part(name, place):
            self._refuse(self._package, f"imports {package}, which is {NOT_LISTED}", for_all=True)

    # -- variables ------------------------------------------------------------------------------------

    def _import(self, name: str, parts: tuple[str, ...]) -> BaseException | None:
        """What the import raised, if anything."""
        environ: Any = os.environ
        before: dict[bytes, bytes] = environ._data
        may_be_set = set() if self._package in self._chosen else self._may_be_set
        during = environ._data = _Watched(before, self, may_be_set)
        os.environb._data = during  # type: ignore[attr-defined]  # the two share it
        raised: BaseException | None = None
        try:
            exec(_IMPORT, {"__name__": "__main__", "name": name, "parts": parts})
        except BaseException as error:  # noqa: BLE001 - SystemExit too: a module may do anything
            raised = error
        finally:
            environ._data = os.environb._data = before  # type: ignore[attr-defined]
            for key, old, new in _differences(before, dict(dict.items(during))):
                if new is None and _is_of_a_worker(key):
                    continue
                # The following imports find it, too. It is repeated in every worker (`run`), but for that of
                # an import that failed: a worker tries it again.
                if raised is not None:
                    self._own.setdefault(key, old)
                elif self._is_users_choice:
                    left.variables[key] = (left.variables.get(key, (old, None))[0], new)
                _put(key, old if self._is_users_choice else new)  # the script imports it later
        return raised


def _choose(lines: list[str]) -> list[str]:
    """The entries, without those of the background that read variables which the user's code may set."""
    first = [line for line in lines if line[:1] not in "!-=&"]
    later = [line[1:] for line in lines if line.startswith("&")]
    if not later:
        return first
    may_be_set = variables_set_in([line[1:] for line in lines if line.startswith("=")], constants_in(first))
    later = [name for name in later if not left_out(name, may_be_set)]
    return [*first, "#", *lines_of(may_be_set), *later]


def _differences(before: Variables, after: Variables) -> list[tuple[bytes, bytes | None, bytes | None]]:
    """Variables, their values before and after; None: not set."""
    both = ((name, before.get(name), after.get(name)) for name in sorted(before.keys() | after.keys()))
    return [one for one in both if one[1] != one[2]]


class _Watched(dict[bytes, bytes]):
    """The environment during an import: variables of a worker are missing, and access to them is noted.

    So is access to those that the user's code may set: a newer version of a package may read more. What a
    package sets would be in effect before the script sets it.
    """

    def __init__(self, variables: Variables, preload: Preload, may_be_set: set[bytes]) -> None:
        super().__init__((name, value) for name, value in variables.items() if not _is_of_a_worker(name))
        self._asked, self._own = preload._asked, preload._own
        self._may_be_set = may_be_set

    def __getitem__(self, name: bytes) -> bytes:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(name)
        return super().__contains__(name)

    def get(self, name: bytes, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[bytes]:
        if (package := _user()[0]) in GOES_THROUGH_ALL:
            return iter([*super().__iter__(), b"LOCAL_RANK"])  # asked for where all are copied
        if package not in _HAND_ON:
            self._asked.append("reads all variables, RANK among them,")
        return super().__iter__()

    def __missing__(self, name: bytes) -> bytes:
        if name == b"LOCAL_RANK" and _user()[1]:
            return b"0"  # a package that goes through all does not look at it
        raise KeyError(name)

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self._note(name, "sets", name in self._own)
        super().__setitem__(name, value)

    def __delitem__(self, name: bytes) -> None:
        self._note(name, "removes", name in self._own)
        super().__delitem__(name)

    def _note(self, name: object, verb: str = "reads", is_known: bool = False) -> None:
        if not isinstance(name, bytes):
            return
        may_be_set = is_known or not self._may_be_set.isdisjoint((name, b"*"))
        if may_be_set or _is_of_a_worker(name):
            package, goes_through_all = _user()
            if package not in _HAND_ON and not goes_through_all:
                self._asked.append(f"{verb} {os.fsdecode(name)}{_MAY_SET * may_be_set}")


def _user() -> tuple[str, bool]:
    """The package that uses the environment, and whether it goes through all of it."""
    frame, goes_through_all = sys._getframe(2), False
    while (name := str(frame.f_globals.get("__name__"))) in (__name__, "os", "collections.abc"):
        assert frame.f_back is not None
        goes_through_all = goes_through_all or frame.f_code.co_name == "__iter__"
        frame = frame.f_back
    return package_of(name), goes_through_all


def _is_of_a_worker(name: bytes) -> bool:
    text = os.fsdecode(name)
    return text in _OF_A_WORKER or text.startswith(_OF_A_WORKER_PREFIXES)


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
        self._ends = [0, 0]

    def __enter__(self) -> list[bytes]:
        """What is printed on stdout and stderr, once it is left."""
        self._flush()
        self._now: list[bytes] = []
        self._before = [_copy(fd) for fd in (1, 2)]
        for fd, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, fd)
        return self._now

    def __exit__(self, *error: object) -> None:
        self._flush()
        for number, kept in enumerate(self._kept):
            end = os.fstat(kept).st_size
            self._now.append(os.pread(kept, end - self._ends[number], self._ends[number]))
            self._ends[number] = end
        for fd, before in zip((1, 2), self._before, strict=True):
            if before is None:
                os.close(fd)
            else:
                os.dup2(before, fd)
                os.close(before)

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


def _place(name: str, path: Any) -> str:
    """The file of a module that is about to be imported; empty: there is none."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec(name, path)
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def _is_part(name: str, place: str) -> bool:
    """Parts of the standard library and of compiled packages, whose names differ from build to build."""
    library = os.path.join(os.path.dirname(os.__file__), "")
    is_library = place.startswith(library) and not place.startswith(library + "site-packages")
    return is_library or name.endswith("__mypyc")


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
