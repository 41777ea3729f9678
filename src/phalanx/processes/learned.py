"""What earlier workers of a script imported: learned while they run, kept in a cache file per script.

The key holds all that could make the list wrong: the script, the interpreter and its flags, and the state of
the package directories (installing anything changes their time stamps). The list is only a hint: every
module is checked again when it is imported (preload.py), and a stale or broken file costs nothing.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_LIMIT = 1 << 20  # bytes; torch and transformers together need about 100 KB
_MOST = 100  # lists
_MARK = "phalanx modules 1"


def cache_dir(environ: Mapping[str, str]) -> str | None:
    """Where the lists are kept; None when there is no home to keep them in."""
    base = environ.get("XDG_CACHE_HOME")
    if not base:
        home = environ.get("HOME")
        if not home:
            return None
        base = os.path.join(home, ".cache")
    return os.path.join(base, "phalanx", "modules")


class Learned:
    """The list of one script."""

    def __init__(self, program: Sequence[str], environ: Mapping[str, str]) -> None:
        self.key = _key(program)
        directory = cache_dir(environ)
        self.path = os.path.join(directory, _name_of(self.key)) if directory else None
        self.names = self._load()

    def _load(self) -> list[str]:
        if self.path is None:
            return []
        try:
            with open(self.path, encoding="utf-8") as file:
                lines = file.read(_LIMIT).splitlines()
        except (OSError, ValueError):
            return []
        if lines[:2] != [_MARK, self.key] or lines[-1:] != ["."]:
            return []  # another version, another key of the same name, or cut off
        return lines[2:-1]

    def add(self, names: Iterable[str]) -> int:
        """Take in what a worker imported, in its order; how many were new."""
        known = set(self.names)
        new = [name for name in dict.fromkeys(names) if name not in known and _is_plain(name)]
        self.names += new
        return len(new)

    def forget(self, name: str) -> None:
        """A module that turned out not to be one for a zygote, and what is below it."""
        self.names = [known for known in self.names if known != name and not known.startswith(name + ".")]

    def save(self) -> None:
        """Write the list, atomically; a file system that does not want it is no trouble."""
        if self.path is None:
            return
        text = "\n".join([_MARK, self.key, *self.names, "."]) + "\n"
        scratch = f"{self.path}.{os.getpid()}"
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            _make_room(os.path.dirname(self.path))
            with open(scratch, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(scratch, self.path)
        except OSError:
            try:
                os.unlink(scratch)
            except OSError:
                pass


def _make_room(directory: str) -> None:
    """Keep the newest lists only: scripts come and go, and with every installed package all keys change."""
    entries = [entry for entry in os.scandir(directory) if entry.is_file()]
    if len(entries) > _MOST:
        entries.sort(key=lambda entry: entry.stat().st_mtime)
        for entry in entries[: len(entries) - _MOST]:
            os.unlink(entry.path)


def _is_plain(name: str) -> bool:
    return bool(name) and name.isprintable() and " " not in name and len(name) < 500


def _key(program: Sequence[str]) -> str:
    """`program` is mode and target; a script counts by its real path."""
    mode, target = program[0], program[1]
    what = os.path.realpath(target) if mode == "script" else f"-{mode[0]} {target}"
    parts = [what, sys.executable, sys.version.split()[0], *program[2:]]
    for path in sys.path:
        if path.endswith(("site-packages", "dist-packages")):
            try:
                parts.append(f"{path}@{os.stat(path).st_mtime_ns}")
            except OSError:
                pass
    return "|".join(part.replace("\n", " ") for part in parts)


def _name_of(key: str) -> str:
    # Not hashlib, which takes longer to import than all of this; the key itself is in the file.
    import zlib

    data = key.encode("utf-8", "surrogateescape")
    return f"{zlib.crc32(data):08x}{zlib.adler32(data):08x}"


def read_names(fd: int) -> list[str]:
    """The names that a worker's recorder has written so far."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, min(size, _LIMIT), 0)
    return data.decode("utf-8", "replace").split("\n")[:-1]
