"""Imports modules in this fresh process, and writes down as JSON what each of them reads, keeps and changes.

    python observe.py OUT BEFORE MODULE ...

Runs in the environment under test: standard library only. BEFORE is what another process wrote that imported
the same, or "-": values that differ are then given in words.

What is found belongs to the module that is being executed: the innermost one. Who imports whom is written
down, too, so that the closure of each module can be judged (judgement.py).
"""

# ruff: noqa: E402 - the place of the wheel's modules has to be known first

from __future__ import annotations

import builtins
import gc
import json
import os
import sys
import time
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[0:1] = [os.path.join(ROOT, "src"), ROOT]

from phalanx import kernel
from phalanx.helpers.preload import import_effects
from phalanx.helpers.preload.guards import shared_maps
from phalanx.helpers.preload.import_effects import ImportState
from tests.warm_packages.script_reads import noting_reads, reads
from tests.warm_packages.values import Clocks, ImportValues, generators_found

del sys.path[0:2]

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/infiniband", "/dev/xpu")
_SHARED = ("socket:", "pipe:", "anon_inode:", "/memfd:")
_GRACE = 5.0  # seconds
ALL = "*"  # read by going through all variables


class Watch:
    """Installed around all imports."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.modules: dict[str, dict[str, Any]] = {}
        self._machinery: Any = sys.modules["_frozen_importlib"]
        self._c_reads = _CReads()
        self._effects = _Effects()
        self._noted = os.environ._data = os.environb._data = _Noted(self, os.environ._data)  # type: ignore[attr-defined]
        machinery = self._machinery
        load, imports, gcd = machinery._load_unlocked, builtins.__import__, machinery._gcd_import

        def _load_unlocked(spec: Any) -> Any:
            self.begin(spec.name)
            try:
                return load(spec)
            finally:
                self.end(spec.name)

        def __import__(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            found = imports(name, globals, locals, fromlist, level)
            self.met(name, globals, fromlist, level)
            return found

        def _gcd_import(name: str, package: Any = None, level: int = 0) -> Any:
            found = gcd(name, package, level)
            self.met(name, {"__package__": package}, (), level)
            return found

        for function in (_load_unlocked, __import__, _gcd_import):
            # Frames of this file count as importlib's own for tracebacks and for the stacklevel of warnings.
            function.__code__ = function.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        machinery._load_unlocked, builtins.__import__ = _load_unlocked, __import__
        machinery._gcd_import = _gcd_import
        self._effects.settle()  # by these lines, and by no module

    def facts(self, name: str) -> dict[str, Any]:
        if name not in self.modules:
            self.modules[name] = {"reads": {}, "c reads": {}, "effects": [], "imports": {}}
        return self.modules[name]

    def begin(self, name: str) -> None:
        self.look()
        self.edge(name)
        self.stack.append(name)
        self.facts(name)

    def end(self, name: str) -> None:
        self.look()
        self.stack.remove(name)

    def look(self) -> None:
        """What was found since the last call belongs to the module on top."""
        reads, why = self._c_reads.new(), self._effects.look(self.stack[-1] if self.stack else "")
        if self.stack:
            facts = self.facts(self.stack[-1])
            facts["c reads"].update(dict.fromkeys(reads))
            facts["effects"] += [one for one in why if one not in facts["effects"]]

    def note_read(self, name: bytes) -> None:
        if self.stack:
            self.facts(self.stack[-1])["reads"][os.fsdecode(name)] = None

    def edge(self, name: str) -> None:
        if self.stack and self.stack[-1] != name:
            self.facts(self.stack[-1])["imports"][name] = None

    def met(self, name: Any, space: Any, fromlist: Any, level: int) -> None:
        """An import statement was executed; the module may have been loaded before."""
        try:
            if level:
                name = self._machinery._resolve_name(
                    name, space.get("__package__") or space["__name__"], level
                )
            names = [name, *(f"{name}.{part}" for part in fromlist or ())]
        except (AttributeError, KeyError, TypeError, ImportError):
            return
        importer = (space or {}).get("__name__")
        for one in names:
            if one in sys.modules:
                self.edge(one)
                if importer in self.modules and importer != one:
                    self.facts(importer)["imports"][one] = None

    def leave(self) -> dict[str, Any]:
        """What holds for the whole."""
        self.look()
        if not self._effects.keeps_threads():
            for facts in self.modules.values():
                facts["effects"] = [why for why in facts["effects"] if "running" not in why]
        return {"environment": self._noted.changed(), "effects": self._effects.after_all()}


class _Noted(dict):  # type: ignore[type-arg]
    """The environment: what is read is noted."""

    def __init__(self, watch: Watch, variables: dict[bytes, bytes]) -> None:
        super().__init__(variables)
        self._watch = watch
        self._before = dict(variables)

    def __getitem__(self, name: bytes) -> bytes:
        self._watch.note_read(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, bytes):
            self._watch.note_read(name)
        return super().__contains__(name)

    def get(self, name: bytes, default: Any = None) -> Any:
        self._watch.note_read(name)
        return super().get(name, default)

    def __iter__(self) -> Any:
        self._watch.note_read(os.fsencode(ALL))
        return super().__iter__()

    def changed(self) -> dict[str, str]:
        after = dict(dict.items(self))
        names = sorted(self._before.keys() | after.keys())
        return {
            repr(name): repr(after.get(name)) for name in names if self._before.get(name) != after.get(name)
        }


class _CReads:
    """What the shim has written since the last call."""

    def __init__(self) -> None:
        self._path = os.environ.get("PROOF_GETENV", "")
        self._at = os.path.getsize(self._path) if os.path.exists(self._path) else 0

    def new(self) -> list[str]:
        try:
            if os.stat(self._path).st_size <= self._at:
                return []
            with open(self._path, "rb") as file:
                file.seek(self._at)
                text = file.read()
        except OSError:
            return []
        self._at += len(text)
        lines = (line.partition(" ") for line in text.decode("utf-8", "replace").splitlines())
        return [name for pid, _, name in lines if pid == str(os.getpid())]


# ---- effects -------------------------------------------------------------------------------------


class _Settings(ImportState):
    """Per module: one that undoes at its end what it has done has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[str, dict[int, Any]] = {}  # module → settings that it has changed so far: before

    def check(self, name: str) -> str:
        settings = import_effects._SETTINGS
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if getattr(spec, "_initializing", False):
            before = self._pending.setdefault(name, {})
            for place, (_, read) in enumerate(settings):
                now = read()
                if now != self._values[place]:
                    before.setdefault(place, self._values[place])
                    self._values[place] = now
            why = f"{reads[0]} during its import" if reads else ""
            reads.clear()
            return why
        for place, value in self._pending.pop(name, {}).items():
            self._values[place] = value
        why = f"{reads[0]} during its import" if reads else ""
        reads.clear()
        return why or self.changed()


class _Effects:
    """Each check compares with what it saw the last time."""

    def __init__(self) -> None:
        self._settings = _Settings()
        self._threads, self._files, self._children = _count_threads(), _numbers(), set(kernel.children())
        self._first_threads = self._threads
        self._masks = _masks()
        self._maps = shared_maps()

    def settle(self) -> None:
        self._settings.changed()
        self._files = _numbers()

    def look(self, name: str) -> list[str]:
        found = [self._settings.check(name), self._new_files(), self._new_children(), self._new_threads()]
        return [one for one in found if one]

    def keeps_threads(self) -> bool:
        """Some end by themselves, soon after their module (a timer that was cancelled)."""
        until = time.monotonic() + _GRACE
        while _count_threads() > self._first_threads and time.monotonic() < until:
            child = os.fork()  # pools that are aware of forks end theirs
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            time.sleep(0.05)
        return _count_threads() > self._first_threads

    def after_all(self) -> list[str]:
        found = []
        new = [name for one, name in shared_maps().items() if one not in self._maps]
        if new:
            found.append(f"maps shared memory ({os.path.basename(min(new))})")
        changed = [word for word, mask in _masks().items() if mask != self._masks[word]]
        if changed:
            found.append(f"changes signals in C code ({', '.join(changed)})")
        return found

    def _new_threads(self) -> str:
        """Fork-aware pools (OpenBLAS) end their threads at a fork; a trial fork distinguishes them."""
        if _count_threads() <= self._threads:
            return ""
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        more = _count_threads() - self._threads
        if more > 0:
            self._threads += more
            return f"leaves {more} thread{'s' * (more > 1)} running"
        return ""

    def _new_files(self) -> str:
        now = _numbers()
        found = ""
        for fd, what in now.items():
            if self._files.get(fd) == what:
                continue
            if what.startswith((*_DEVICES, *_SHARED)) or what.endswith(" (deleted)"):
                found = found or f"opens {what.partition('[')[0].strip(':')}"
        self._files = now
        return found

    def _new_children(self) -> str:
        now = set(kernel.children())
        new, self._children = now - self._children, now
        return "starts a process" if new else ""


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _numbers() -> dict[str, str]:
    """Descriptors and what they are, without that of the listing: the next file gets its number."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return found


def _masks() -> dict[str, int]:
    with open("/proc/self/status") as file:
        pairs = [line.split() for line in file if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    # libc keeps two signals for itself, and handles them from the first thread on.
    return {words[0].strip(":"): int(words[1], 16) & ~(0b11 << 31) for words in pairs}


# ---- names and versions --------------------------------------------------------------------------


def row_names(modules: list[str]) -> dict[str, str]:
    """module → the import name whose row covers it: the top level, or below a namespace package."""
    found = {}
    for name in modules:
        row = ""
        for part in name.split("."):
            row = f"{row}.{part}" if row else part
            spec = getattr(sys.modules.get(row), "__spec__", None)
            if type(getattr(spec, "loader", None)).__name__ not in ("NamespaceLoader", "_NamespaceLoader"):
                break
        else:
            row = ""  # a namespace has no code of its own
        found[name] = row
    return found


def versions(rows: set[str]) -> dict[str, list[str]]:
    """row → distribution and version, by the files that each distribution lists."""
    from importlib import metadata

    owners: dict[str, tuple[str, str]] = {}
    for one in metadata.distributions():
        owner = one.metadata["Name"], one.version  # reads the whole file of it each time
        for file in one.files or ():
            owners[str(one.locate_file(file))] = owner
    found = {}
    for row in rows:
        module = sys.modules.get(row)
        path = getattr(getattr(module, "__spec__", None), "origin", None) or getattr(module, "__file__", None)
        if path in owners:
            found[row] = list(owners[path])
    return found


def is_of_the_library(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def main(out: str, before: str, names: list[str]) -> None:
    clocks = Clocks()
    known = {*sys.modules, "__mp_main__"}
    state = noting_reads()
    state.__enter__()
    watch = Watch()
    failed: dict[str, str] = {}
    began = time.monotonic()
    for name in names:
        try:
            __import__(name)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: a module may do anything
            failed[name] = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
    seconds = time.monotonic() - began
    whole = watch.leave()
    state.__exit__()
    # What follows is this file's own.
    os.environ._data = os.environb._data = dict(dict.items(watch._noted))  # type: ignore[attr-defined]
    new = [name for name in list(sys.modules) if name not in known]
    third = [name for name in new if not is_of_the_library(name) and not name.startswith("phalanx.")]
    gc.collect()
    generators = generators_found(third)
    values = ImportValues(third, clocks)
    other: Any = None
    if before != "-":
        with open(before) as file:
            other = json.load(file)
    uuids = values.uuids_found()
    rows = row_names(third)
    result = {
        "asked": names,
        "failed": failed,
        "seconds": round(seconds, 2),
        "loaded": third,
        "rows": rows,
        "modules": {
            name: {
                "reads": list(facts["reads"]),
                "c reads": list(facts["c reads"]),
                "effects": facts["effects"],
                "imports": list(facts["imports"]),
            }
            for name, facts in watch.modules.items()
            if name in new
        },
        "whole": whole,
        "values": values.sums,
        "again": values.again,
        "uuids": uuids,
        "generators": generators,
        "words": values.words(other["values"]) if other else {},
        "versions": versions(set(rows.values())),
    }
    with open(out, "w") as file:
        json.dump(result, file)
    for pid in kernel.children():
        os.kill(pid, 9)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
