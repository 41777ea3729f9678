"""The modules that earlier workers of a script imported, in a cache file per script.

The key contains what could invalidate the list: the script, the interpreter and its flags, and the state of
the package directories (which packages are there, and when they were installed). The user's own code can
invalidate it too, by what it does before an import: set variables, change sys.path, or shadow an installed
module with a file of the same name. The list is therefore discarded when a line that looks like one of these
was edited, or when such a file has appeared beside the script. import_recorder.py defines the format of the
lines.

A module that does not suit a fork is marked as unsuitable, one that was preloaded once without trouble as
vetted. Only vetted modules are preloaded while a start waits for them, and only those that the script imports
before it does anything that can be seen (leading_imports.py). The others are tried in the background
(helper_pool.py). The file contains:

    -NAME                      an unsuitable module
    =TIME SIZE CHECKSUM PATH   a user's file
    >TIME SIZE PATH            the file of `__main__`, and what its leading block imports: ^NAME …
    LINE                       a module or another line of the recorder; "," in front of it: not vetted
    ;                          the end of the leading ones
    %NAME COUNT                threads that were started with the import of a leading module
    #SECONDS                   that the preload took when the list was vetted

Every module is checked again when it is preloaded (preload.py); a stale or broken file is ignored. The list
decides what the zygote imports, so a file that another user could have written is ignored too, and nothing is
written to a directory that others can change (trusted_files.py).
"""

from __future__ import annotations

import os
import sys

from phalanx.trusted_files import open_trusted, write_trusted
from phalanx.warm.verdict_log import covers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from phalanx.warm.verdict_log import VerdictLog

_LIMIT = 1 << 20  # bytes; torch and transformers together need about 100 KB
_MOST = 100  # lists
_MARK = "phalanx modules 4"
_MARKS = ("-", "=", ">", "^", ";", "#", "%", "@", "$")  # of lines that are not part of the list
_MOST_OWN = 1000  # user files that are checked for edits
# A user's line that contains one of these may affect later imports.
_RELEVANT = (b"environ", b"putenv", b"dotenv", b"sys.path", b"sys.modules", b"addsitedir", b"meta_path")


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
        self._program, self._environ = program, environ
        self.key = _key(program)
        directory = cache_dir(environ)
        self.path = os.path.join(directory, _name_of(self.key)) if directory else None
        self.names: list[str] = []  # and other lines of import_recorder.py
        self._vetted: set[str] = set()
        self.outdated = False  # a worker has found that something must not be preloaded (late_variables.py)
        self._hints: list[str] = []  # lines that name modules which may have started threads
        self.seconds = 0.0  # that their preload took
        self.unsuitable: dict[str, str] = {}  # name → why
        self._random: list[str] = []  # @ and $: what is random, and what only looks like it (twin.py)
        self._leading: set[str] = set()
        self._block: _Block | None = None
        self._own: dict[str, _File] = {}
        first = _first_path(program)
        if program[0] == "script":
            self._own[os.path.realpath(program[1])] = _File(os.path.realpath(program[1]))
        self._load(first)

    def _load(self, first: str) -> None:
        if self.path is None:
            return
        try:
            with open(open_trusted(self.path), encoding="utf-8", errors="surrogateescape") as file:
                lines = file.read(_LIMIT).split("\n")
        except (OSError, ValueError):
            return
        if lines[:2] != [_MARK, self.key] or lines[-2:] != [".", ""]:
            return  # another version, another key with the same file name, or truncated
        try:
            files = [_File.read(line[1:]) for line in lines[2:-2] if line.startswith("=")]
            seconds = max((float(line[1:]) for line in lines[2:-2] if line.startswith("#")), default=0.0)
            block = _Block.read([line for line in lines[2:-2] if line.startswith((">", "^"))])
        except ValueError:
            return
        found = [line for line in lines[2:-2] if line[:1] not in _MARKS]
        names = [line.removeprefix(",") for line in found]
        if all(file.is_unchanged() for file in files) and not _shadows(first, names):
            self.names = names
            self.seconds = seconds
            self._hints = [line for line in lines[2:-2] if line.startswith("%")]
            self._vetted = {line for line in found if _is_module(line)}
            bad = (line[1:].partition(" ") for line in lines[2:-2] if line.startswith("-"))
            self.unsuitable = {name: why for name, _, why in bad}
            self._own = {file.path: file for file in files}
            self._random = [line for line in lines[2:-2] if line.startswith(("@", "$"))]
            self._block = block
            if block is None or block.is_unchanged():
                count = lines.index(";") if ";" in lines else 0
                self._leading = {line.removeprefix(",") for line in lines[2:count]}

    def add(self, lines: Iterable[str], complete: bool = False) -> bool:
        """Add the lines of a worker's recorder, in order; whether something is new.

        `complete`: nothing was preloaded in this worker, so that these are all its imports.
        """
        lines = list(dict.fromkeys(lines))
        late = [line[1:].partition(" ") for line in lines if line.startswith("-")]
        late = [(name, _, why) for name, _, why in late if name not in self.unsuitable]
        self.unsuitable |= {name: why for name, _, why in late}
        if late:
            self.outdated = True
            self.names = [name for name in self.names if not self._is_unsuitable(name)]
        known = {*self.names, *(f"={path}" for path in self._own)}
        given = [line for line in lines if _is_plain(line) and not line.startswith("-")]
        new = [line for line in given if line not in known and line[0] not in ">@%"]
        for line in new:
            if line.startswith("=") and len(self._own) < _MOST_OWN:
                self._own[line[1:]] = _File(line[1:])
        before = self._leading
        if complete:
            self._find_leading(given)
        names = [line for line in given if line[0] not in "=~>@%" and not self._is_unsuitable(line)]
        if complete:
            self.names = list(dict.fromkeys([*names, *self.names]))
        else:
            self.names += [line for line in names if line not in known]
        return bool(new) or bool(late) or before != self._leading

    def _find_leading(self, lines: list[str]) -> None:
        main = next((line[1:] for line in lines if line.startswith(">")), None)
        if main is None:  # a function: all that is imported until it is called, and it may import more
            self._block = None
            self._leading = {line for line in lines if line[0] not in "=~%"}
            self._hints = [line for line in lines if line[0] == "%"]
            return
        if self._block is None or not self._block.is_same(main):
            self._block = _Block(main)
        self._leading = set()
        self._hints = []
        for line in lines:
            if line.startswith("@"):
                if int(line[1:]) > self._block.end:
                    break
            elif line.startswith("%"):
                self._hints.append(line)
            elif line[0] not in "=~>":
                self._leading.add(line)

    def judge(self, names: Iterable[str], log: VerdictLog) -> None:
        """Take in what a preload of these lines found, even if it was cut short."""
        for name, why in [
            *log.unsuitable.items(),
            *((one, f"imports {log.importers[one]}") for one in log.importers),
        ]:
            if name not in self.unsuitable or why != "is known to be unsuitable":
                self.unsuitable[name] = why
        self.names = [known for known in self.names if not self._is_unsuitable(known)]
        if log.seconds is not None:
            if log.fixed or log.renewals:
                self._random = [f"${log.fixed}", *(f"@{line}" for line in log.renewals)]
            self.seconds = log.seconds
            self._vetted.update(name for name in names if _is_module(name) and not self._is_unsuitable(name))

    def distrust(self) -> None:
        """Vetted modules have proved unsuitable, or took too long: vet all again."""
        self._vetted.clear()

    def renewed(self) -> ImportCache | None:
        """The list for the packages as they are now, if any was installed, upgraded or removed since."""
        return None if _key(self._program) == self.key else ImportCache(self._program, self._environ)

    def own_lines(self) -> list[str]:
        """The user's files, the script first: the preload looks at the variables that they set."""
        return [f"={path}" for path in self._own]

    def modules(self) -> list[str]:
        """The modules that workers have imported, without those that are unsuitable."""
        return [line for line in self.names if _is_module(line)]

    def is_vetted(self, name: str) -> bool:
        """Whether it was preloaded before, without trouble."""
        return name in self._vetted

    def _is_unsuitable(self, name: str) -> bool:
        return covers(self.unsuitable, name)

    def first_lines(self) -> list[str]:
        """What a start may wait for: vetted modules that the script imports first, and what affects them."""
        leading = [name for name in self.names if name in self._leading or name.startswith("!")]
        lines = [name for name in leading if not _is_module(name) or name in self._vetted]
        return [*self._random, *self._with_unsuitable(lines)] if any(map(_is_module, lines)) else []

    def untried_lines(self) -> list[str]:
        """The same, vetted or not, if nothing is known to be unsuitable; for a start that may try them."""
        lines = [name for name in self.names if name in self._leading or name.startswith("!")]
        if self.unsuitable or not any(map(_is_module, lines)):
            return []
        return [*self.own_lines(), *self._hints, *lines]

    def all_lines(self) -> list[str]:
        """What helpers in the background try."""
        return [*self.own_lines(), *self._with_unsuitable(self.names)]

    def _with_unsuitable(self, lines: list[str]) -> list[str]:
        return [*(f"-{name}" for name in self.unsuitable), *lines]

    def save(self) -> None:
        """Write the list atomically; errors are ignored."""
        if self.path is None:
            return
        own = [f"={file.written()}" for file in self._own.values()]
        bad = [f"-{name} {why}" for name, why in self.unsuitable.items()]
        names = [f",{name}" if _is_module(name) and name not in self._vetted else name for name in self.names]
        first = [line for line in names if line.removeprefix(",") in self._leading]
        rest = [line for line in names if line.removeprefix(",") not in self._leading]
        block = self._block.written() if self._block is not None else []
        head = [_MARK, self.key, f"#{self.seconds:.3f}", *self._hints]
        text = "\n".join([*head, *bad, *own, *self._random, *block, *first, ";", *rest, "."]) + "\n"
        try:
            write_trusted(self.path, text.encode("utf-8", "surrogateescape"))
            _make_room(os.path.dirname(self.path))
        except OSError:
            pass


class _Block:
    """The leading block of a script, and whether it still is one."""

    def __init__(
        self, path: str, seen: tuple[int, int] | None = None, names: list[str] | None = None
    ) -> None:
        self.path = path
        self.seen = seen or _stat(path)
        self.end = 0
        if names is None:
            from phalanx.warm.leading_imports import leading_imports

            self.end, names = leading_imports(path)
        self.names = names

    @classmethod
    def read(cls, lines: list[str]) -> _Block | None:
        """From lines of the cache file."""
        if not lines:
            return None
        time, size, path = lines[0][1:].split(" ", 2)
        return cls(path, (int(time), int(size)), [line[1:] for line in lines[1:]])

    def written(self) -> list[str]:
        return [f">{self.seen[0]} {self.seen[1]} {self.path}", *(f"^{name}" for name in self.names)]

    def is_same(self, path: str) -> bool:
        """Whether it is of this file, and was read since the file was changed."""
        return self.end > 0 and (self.path, self.seen) == (path, _stat(path))

    def is_unchanged(self) -> bool:
        """Whether the script still imports all of this before anything else."""
        if _stat(self.path) == self.seen:
            return True
        now = _Block(self.path)
        return now.end > 0 and set(self.names) <= set(now.names)


class _File:
    """A user's file, and a checksum of its relevant lines."""

    def __init__(self, path: str, seen: tuple[int, int, int] | None = None) -> None:
        self.path = path
        self.seen = seen or (*_stat(path), _checksum(path))  # time, size, checksum

    @classmethod
    def read(cls, text: str) -> _File:
        """From a line of the cache file."""
        time, size, lines, path = text.split(" ", 3)
        return cls(path, (int(time), int(size), int(lines)))

    def written(self) -> str:
        return " ".join([*(str(number) for number in self.seen), self.path])

    def is_unchanged(self) -> bool:
        """Whether no relevant line was edited."""
        now = _stat(self.path)
        if now == self.seen[:2]:
            return True
        lines = _checksum(self.path)
        same = lines == self.seen[2] and now != (0, 0)
        self.seen = (*now, lines)
        return same


def _stat(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _checksum(path: str) -> int:
    import zlib

    try:
        with open(path, "rb") as file:
            text = file.read(_LIMIT)
    except OSError:
        return 0
    return zlib.crc32(
        b"\n".join(line for line in text.splitlines() if any(word in line for word in _RELEVANT))
    )


def _first_path(program: Sequence[str]) -> str:
    """The first directory in which the program's modules are searched."""
    mode, target = program[0], program[1]
    if mode == "script":
        return target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
    return os.getcwd() if mode in ("module", "code") else ""


def _shadows(first: str, names: list[str]) -> bool:
    """Whether the directory contains a module with the name of an installed one in the list."""
    try:
        entries = os.listdir(first) if first and names else []
    except OSError:
        return False
    tops = {name.partition(".")[0] for name in names}
    for entry in entries:
        name, _, suffix = entry.partition(".")
        if name in tops and (
            suffix.endswith(("py", "pyc", "so"))
            or (not suffix and os.path.exists(os.path.join(first, name, "__init__.py")))
        ):
            return True
    return False


def _make_room(directory: str) -> None:
    """Keep only the newest lists: every installed package changes all keys."""
    entries = [entry for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]
    if len(entries) > _MOST:
        entries.sort(key=lambda entry: entry.stat().st_mtime)
        for entry in entries[: len(entries) - _MOST]:
            os.unlink(entry.path)


def _is_module(line: str) -> bool:
    """Whether it names a module: not one of the recorder's other lines, and not marked as unvetted."""
    return line[:1] not in ("+", "?", "!", ",", "=", "@", "#", "-", "$", "%")


def _is_plain(line: str) -> bool:
    if line.startswith(("=", "+", "?", ">", "%")):
        return len(line) < 5000
    return bool(line) and line.isprintable() and " " not in line and len(line) < 500


def _key(program: Sequence[str]) -> str:
    """`program` is mode and target; a script is identified by its real path."""
    mode, target = program[0], program[1]
    what = os.path.realpath(target) if mode == "script" else f"-{mode[0]} {target}"
    parts = [what, sys.executable, sys.version.split()[0], *program[2:]]
    for path in sys.path:
        if path.endswith(("site-packages", "dist-packages")):
            try:
                parts.append(f"{path}@{_installed_state(path)}")
            except OSError:
                pass
    return "|".join(part.replace("\n", " ") for part in parts)


def _installed_state(folder: str) -> str:
    """Changes when a package is installed, upgraded or removed, and not when byte code is first written."""
    import zlib

    names = []
    newest = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name != "__pycache__":
                names.append(entry.name)
                if entry.name.endswith("-info") or entry.is_file():
                    newest = max(newest, entry.stat().st_mtime_ns)
    return f"{zlib.crc32(os.fsencode(chr(0).join(sorted(names)))):08x}.{newest}"


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
