"""What helpers import for a script before it runs, and what is known of it from earlier launches.

The first start of a launch waits for what the script imports before it does anything that can be seen, read
from its text (leading_imports.py). Helpers in the background, for restarts, also import what workers were
seen to import later. Only modules of listed packages count (preload_list.py). A file per script keeps

    the user's files that were read, with their times and sizes: a block is read again when one was edited
    the block at the top of the script, with what may be set by then, and whether the script may put
    directories in front of the installed packages
    packages that did not suit a fork for this script, and why
    what a worker imported: NAME, =PATH of a user's file, !NAME that is hidden by a file

The key, in its first line, contains the script, the interpreter and its flags, the packages that files beside
the script hide, and the state of the package directories (what is there, and since when). The rest is written
with marshal, as messages are. One more file for each such state keeps what the guards found, for all scripts.

A stale or broken file is ignored. The list decides what the zygote imports, so a file that another user could
have written is ignored too, and nothing is written to a directory that others can change (trusted_files.py).
"""

from __future__ import annotations

import marshal
import os
import sys

from phalanx.agent.warm.leading_imports import LeadingImport, leading_imports
from phalanx.helpers.preload.import_recorder import homes
from phalanx.helpers.preload.packages import PACKAGES
from phalanx.helpers.preload.preload_list import is_listed, left_out, names_in, package_of
from phalanx.helpers.preload.variables import constants_in, lines_of, variables_set_in
from phalanx.trusted_files import open_trusted, write_trusted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from phalanx.helpers.messages import OwnFile

_LIMIT = 1 << 20  # bytes; torch and transformers together need about 100 KB
_MOST = 100  # lists
_FORMAT = "7"
_MOST_OWN = 1000  # user files that are remembered


def cache_dir(environ: Mapping[str, str]) -> str | None:
    """The directory of the lists; None without a home directory."""
    base = environ.get("XDG_CACHE_HOME")
    if not base:
        home = environ.get("HOME")
        if not home:
            return None
        base = os.path.join(home, ".cache")
    return os.path.join(base, "phalanx", "modules")


class ImportCache:
    """The list of one script."""

    def __init__(self, program: Sequence[str], environ: Mapping[str, str]) -> None:
        """`program`: mode, target and interpreter flags; of a function, `module:name` and the main file."""
        self._program, self._environ = program, environ
        self._hidden, self._folders = _names_in(_first_path(program))
        packages = _state_of_packages()
        self.key, self._for_all = _key(program, self._hidden, packages), f"all scripts|{packages}"
        directory = cache_dir(environ)
        self.path, self._path_for_all = (
            os.path.join(directory, _name_of(key)) if directory else None for key in (self.key, self._for_all)
        )
        self._unfit: dict[str, str] = {}  # package → why, for all scripts
        self.seen: list[str] = []  # lines of import_recorder.py
        self.refused: dict[str, str] = {}  # package → why
        self.block: list[LeadingImport] = []
        self._files: list[OwnFile] = []  # of the block
        self._edits_path = False
        self._was_seen = False  # with this block, by a worker
        if not self._load():
            self._read_block()

    def _load(self) -> bool:
        """Whether the block is known."""
        self._read_unfit()
        self.refused = dict(self._unfit)
        kept = _read(self.path, self.key)
        if kept is None:
            return False
        files, block, edits_path, refused, self.seen = kept
        self.refused |= refused
        if any(_state(file[0]) != file for file in files):
            return False
        self._files, self._edits_path, self._was_seen = files, edits_path, bool(self.seen)
        self.block = [LeadingImport(*entry) for entry in block]
        return True

    def _read_unfit(self) -> None:
        (self._unfit,) = _read(self._path_for_all, self._for_all) or ({},)

    def _read_block(self) -> None:
        search = [_first_path(self._program), *sys.path[1:]]
        found = leading_imports(self._program, [path for path in search if path], homes(), _file_of)
        self._files = [_state(path) for path in found.own]
        self.block = [entry for entry in found.entries if _is_plain(entry.line)]
        self._edits_path = found.edits_path

    # -- what to import -----------------------------------------------------------------------------

    def why_not(self, entry: LeadingImport) -> str:
        """Why a module of the block is left to the workers; '' if it is preloaded."""
        package = package_of(entry.name)
        if package in self.refused:
            return self.refused[package]
        if package in self.hidden:
            return "is hidden by a file of yours"
        why = left_out(entry.name, entry.may_be_set)
        if not why and self._edits_path and not self._was_seen:
            return "your code edits sys.path, and was not run since"
        return why

    def why_not_later(self, package: str) -> str:
        """The same for what workers import later on."""
        if package in self.refused or package in self.hidden:
            return self.refused.get(package, "is hidden by a file of yours")
        own = [file[0] for file in self._files] + [line[1:] for line in self.seen if line.startswith("=")]
        return left_out(package, variables_set_in(own, constants_in(entry.line for entry in self.block)))

    @property
    def hidden(self) -> set[str]:
        """Packages that the script finds elsewhere."""
        elsewhere = {line[1:] for line in self.seen if line.startswith("!")} if self._edits_path else set()
        return self._hidden | elsewhere

    def first_lines(self) -> list[str]:
        """What a start may wait for: what the script imports first, and what affects it."""
        if self._program[0] == "function":  # it is called after all imports
            return self.all_lines()
        lines = self._first()
        if not any(package_of(name) in PACKAGES for name in names_in(lines)):
            return []  # only of the standard library: a worker imports them as fast
        return [*self._forbidden(), *lines]

    def _first(self) -> list[str]:
        lines: list[str] = []
        for entry in self.block:
            if not entry.name or not self.why_not(entry):
                lines += [line for line in lines_of(entry.may_be_set) if line not in lines]
                lines.append(entry.line)
        return lines

    def all_lines(self) -> list[str]:
        """What helpers in the background import: also what workers imported later."""
        first, later = self._first(), self.modules()
        if not later and not names_in(first):
            return []
        own = [f"={file[0]}" for file in self._files]
        own += [line for line in self.seen if line.startswith("=") and line not in own]
        return [*self._forbidden(), *own, *first, *(f"&{name}" for name in later)]

    def modules(self) -> list[str]:
        """Modules of listed packages that workers have imported."""
        without = self.hidden | self.refused.keys()
        return [
            line
            for line in self.seen
            if line[:1] not in ("=", "!") and is_listed(line) and package_of(line) not in without
        ]

    def wanted(self) -> set[str]:
        """What is gained by importing `all_lines`: not the standard library at the top of a script."""
        first = {name for name in names_in(self._first()) if package_of(name) in PACKAGES}
        return first.union(self.modules())

    def _forbidden(self) -> list[str]:
        elsewhere = self.hidden - self._hidden | self.refused.keys()
        beside = [*self._hidden, *(f"{name}/" for name in self._folders)]
        return [*(f"!{name}" for name in sorted(elsewhere)), *(f"-{name}" for name in sorted(beside))]

    # -- what is learned ------------------------------------------------------------------------------

    def add(self, lines: Iterable[str]) -> bool:
        """Add the lines of a worker's recorder, in order; whether something is new."""
        known = set(self.seen)
        new = [line for line in dict.fromkeys(lines) if line not in known and _is_plain(line)]
        room = _MOST_OWN - sum(line.startswith("=") for line in self.seen)
        own = [line for line in new if line.startswith("=")]
        too_many = set(own[max(0, room) :])
        self.seen += [line for line in new if line not in too_many]
        self._was_seen = self._was_seen or bool(new)
        return bool(new)

    def refuse(self, package: str, why: str, for_all: bool = False) -> None:
        """This package did not suit a fork; `for_all`: nor will it for another script."""
        self.refused[package] = why
        if for_all:
            self._read_unfit()  # what other launches have found meanwhile
            self._unfit[package] = why
            _write(self._path_for_all, self._for_all, self._unfit)

    def allow(self, names: Iterable[str]) -> None:
        """The user names these modules: a package that imports one of them may suit a fork now."""
        for package, why in list(self.refused.items()):
            if package in names or any(why.startswith(f"imports {name}, ") for name in names):
                del self.refused[package]

    def renewed(self) -> ImportCache | None:
        """The list for the packages as they are now, if any was installed, upgraded or removed since."""
        same = _key(self._program, self._hidden, _state_of_packages()) == self.key
        return None if same else ImportCache(self._program, self._environ)

    def save(self) -> None:
        """Write the list atomically; errors are ignored."""
        block = [(entry.line, entry.may_be_set) for entry in self.block]
        refused = dict(self.refused.items() - self._unfit.items())
        _write(self.path, self.key, self._files, block, self._edits_path, refused, self.seen)


def _read(path: str | None, key: str) -> Any:
    """What was written there for this key; None for anything else."""
    if path is None:
        return None
    try:
        with open(open_trusted(path), "rb") as file:
            first, _, data = file.read(_LIMIT).partition(b"\n")
        return marshal.loads(data) if os.fsdecode(first) == key else None
    except (OSError, ValueError, EOFError, TypeError):
        return None


def _write(path: str | None, key: str, *values: Any) -> None:
    if path is None:
        return
    try:
        write_trusted(path, os.fsencode(key) + b"\n" + marshal.dumps(values))
        _make_room(os.path.dirname(path))
    except OSError:
        pass


def _state(path: str) -> OwnFile:
    try:
        found = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, found.st_mtime_ns, found.st_size


def _first_path(program: Sequence[str]) -> str:
    """The first directory in which the program's modules are searched."""
    mode, target = program[0], program[1]
    if mode == "script":
        return target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
    return os.getcwd() if mode in ("module", "code") else ""


def _file_of(module: str) -> str:
    """The file of an installed module that is run as a program (-m), or that a function comes from."""
    from importlib.machinery import PathFinder

    path = None
    origin = ""
    for part in module.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return ""
        path, origin = spec.submodule_search_locations, spec.origin or ""
    return os.path.join(next(iter(path)), "__main__.py") if path else origin


def _names_in(folder: str) -> tuple[set[str], set[str]]:
    """The names of modules in this directory, and of directories that are packages if nothing else is."""
    try:
        entries = os.listdir(folder) if folder else []
    except OSError:
        return set(), set()
    modules, folders = set(), set()
    for entry in entries:
        name, _, suffix = entry.partition(".")
        if not name.isidentifier():
            continue
        if suffix.endswith(("py", "pyc", "so")) or os.path.exists(os.path.join(folder, entry, "__init__.py")):
            modules.add(name)
        elif not suffix and os.path.isdir(os.path.join(folder, name)):
            folders.add(name)
    return modules, folders


def _make_room(directory: str) -> None:
    """Keep only the newest lists: every installed package changes all keys."""
    entries = [entry for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]
    if len(entries) > _MOST:
        entries.sort(key=lambda entry: entry.stat().st_mtime)
        for entry in entries[: len(entries) - _MOST]:
            os.unlink(entry.path)


def _is_plain(line: str) -> bool:
    """Whether it can be written as one line."""
    return bool(line) and line.isprintable() and "\t" not in line and len(line) < 5000


def _key(program: Sequence[str], hidden: Iterable[str], packages: str) -> str:
    """`program` is mode and target; a script is identified by its real path."""
    mode, target = program[0], program[1]
    what = os.path.realpath(target) if mode == "script" else f"-{mode[0]} {target}"
    return "|".join([what, *program[2:], *sorted(hidden), packages]).replace("\n", " ")


def _state_of_packages() -> str:
    """Changes when a package is installed, upgraded or removed, and not when byte code is first written."""
    import zlib

    parts = [_FORMAT, sys.executable, sys.version.split()[0]]
    for path in sys.path:
        if not path.endswith(("site-packages", "dist-packages")):
            continue
        try:
            with os.scandir(path) as found:
                entries = [entry for entry in found if entry.name != "__pycache__"]
            dated = [entry for entry in entries if entry.name.endswith("-info") or entry.is_file()]
            newest = max((entry.stat().st_mtime_ns for entry in dated), default=0)
        except OSError:
            continue
        names = zlib.crc32(os.fsencode(chr(0).join(sorted(entry.name for entry in entries))))
        parts.append(f"{path}@{names:08x}.{newest}")
    return "|".join(parts).replace("\n", " ")


def _name_of(key: str) -> str:
    # Not hashlib, which takes longer to import than the rest; the file itself contains the key.
    import zlib

    data = key.encode("utf-8", "surrogateescape")
    return f"{zlib.crc32(data):08x}{zlib.adler32(data):08x}"


def read_names(fd: int) -> list[str]:
    """The lines that a worker's recorder has written so far."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, min(size, _LIMIT), 0)
    return data.decode("utf-8", "surrogateescape").split("\n")[:-1]
