"""The values that modules have after their import, compared between two processes that imported the same.

A value that differs was drawn from the system or the clock, or names something that exists only once (a
temporary directory, a key, an identifier). In a fork, all ranks and all restarts would share it.

* The time of the import, the process number and random identifiers (UUIDs) are set again in every worker.
* For any other value that differs, the module is not preloaded, except for a few that are known (_KNOWN).

What is looked at: numbers and text in the modules, in the classes and the defaults of functions defined
there, in containers, and in instances that a module keeps, a few levels deep. No code of the modules runs
meanwhile.
"""

from __future__ import annotations

import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    Place = tuple[Any, ...]

_DEPTH = 4  # a module's dict, an instance, its list, a tuple in it
_MOST = 2000  # elements of one container
_SIMPLE = (str, bytes, int, float, complex, bool)
_TEXT_OF = ("UUID", "datetime", "date", "PosixPath", "TemporaryDirectory")
_UUID = (
    r"(?<![0-9a-f])[0-9a-f]{8}(-?)[0-9a-f]{4}\1[14][0-9a-f]{3}\1[89ab][0-9a-f]{3}\1[0-9a-f]{12}(?![0-9a-f])"
)

# Values that differ in every process: what a worker does about them.
_KNOWN: dict[str, Callable[[Any], object]] = {
    # The name of a semaphore that existed during the import only.
    "joblib._multiprocessing_helpers.name": lambda name: None,
    # The last of a set of functions, which is in another order in every process.
    "scipy.sparse._data.name": lambda name: None,
    # The date in the comments of C code that it writes.
    "numpy.f2py.rules.module_rules": lambda rules: None,
    # The first number of unnamed symbols.
    "sympy.core.symbol.Dummy": lambda dummy: _set(
        dummy, "_base_dummy_index", dummy._prng.randint(10**6, 9 * 10**6)
    ),
}

_OF_A_MODULE: Any = dict(vars(types.ModuleType))[
    "__dict__"
]  # a lazy module may have an attribute of that name


class Clocks:
    """Recognizes values of clocks that were read since it was made."""

    def __init__(self) -> None:
        import time  # built in

        self._time = time
        self._wall = time.time()
        self._steady = time.monotonic()

    def kind(self, value: float) -> str:
        """wall, steady, wall_ns, steady_ns, seconds; or ''."""
        wall, steady = self._time.time(), self._time.monotonic()
        if type(value) is float:
            if self._wall <= value <= wall:
                return "wall"
            # A round number may be a constant.
            return "steady" if self._steady <= value <= steady and value % 1 else ""
        if int(self._wall) <= value <= wall:
            return "seconds"
        if self._wall <= value / 1e9 <= wall:
            return "wall_ns"
        return "steady_ns" if self._steady <= value / 1e9 <= steady and value % 1000 else ""

    @staticmethod
    def now(kind: str) -> float:
        """The present value of a clock."""
        import time

        if kind == "seconds":
            return int(time.time())
        if kind in ("wall", "steady"):
            return time.time() if kind == "wall" else time.monotonic()
        return time.time_ns() if kind == "wall_ns" else time.monotonic_ns()


class Renewal:
    """Values that every worker sets again: where they are, and of which kind (a clock, pid, uuid)."""

    def __init__(self, lines: Iterable[str]) -> None:
        """`lines`: as ImportValues writes them."""
        self._places: list[tuple[Any, Any, str]] = []
        for line in lines:
            kind, _, path = line.partition(" ")
            found = _find(path.split("\t"))
            if found is not None:
                self._places.append((*found, kind))
        self._known = [path for path in _KNOWN if path.rpartition(".")[0] in sys.modules]

    def apply(self) -> None:
        """In a worker: identifiers of its own, its process number, and the present time."""
        uuids: dict[str, str] = {}
        for container, key, kind in self._places:
            if kind == "uuid":
                old = _get(container, key)
                _set(container, key, uuids.setdefault(old, _other_uuid(old)))
            else:
                _set(container, key, os.getpid() if kind == "pid" else Clocks.now(kind))
        for path in self._known:
            module, _, name = path.rpartition(".")
            value = getattr(sys.modules.get(module), name, None)
            if value is not None:
                _KNOWN[path](value)


class ImportValues:
    """The values of some modules: check sums for a comparison, and what every worker sets again."""

    def __init__(self, modules: Iterable[str], clocks: Clocks) -> None:
        self.sums: dict[str, int] = {}
        self._again: list[str] = []  # lines for Renewal
        self._uuids: dict[str, list[Place]] = {}  # by their text
        self._clocks = clocks
        self._pid = os.getpid()
        self._seen: set[int] = set()
        for name in modules:
            module = sys.modules.get(name)
            if isinstance(module, types.ModuleType) and not _is_of_the_library(name):
                self.sums[name] = self._of_module(name, _namespace(module))

    def details(self, name: str) -> dict[str, int]:
        """The check sum of every name in a module."""
        self._seen.clear()
        space = _namespace(sys.modules[name])
        return {key: self._sum((name, key), value, name, _DEPTH) for key, value in _items(space)}

    @property
    def identifiers(self) -> set[int]:
        """Check sums of all texts that look like random identifiers."""
        return {checksum(text) for text in self._uuids}

    def settle(self, constant: set[int]) -> list[str]:
        """Forget those that another process has, too; returns the modules whose own cannot be made again."""
        self._uuids = {text: at for text, at in self._uuids.items() if checksum(text) not in constant}
        self._uuids[f"-{self._pid}"] = []  # to see how many references the loop itself has
        counts = [(sys.getrefcount(text), places) for text, places in self._uuids.items()]
        own, _ = counts.pop()
        self._uuids.popitem()
        # `places` has to name all references.
        return [
            places[0][0]
            for count, places in counts
            if count - own != len(places) or not all(map(_written, places))
        ]

    def renewals(self) -> list[str]:
        """What every worker sets again; call `settle` before."""
        uuids = [f"uuid {_written(place)}" for places in self._uuids.values() for place in places]
        return [*self._again, *uuids]

    def _of_module(self, name: str, space: dict[str, Any]) -> int:
        total = 0
        for key, value in _items(space):
            if f"{name}.{key}" not in _KNOWN:
                total += hash((key, self._sum((name, key), value, name, _DEPTH)))
        return total

    def _sum(self, place: Place, value: Any, home: str, depth: int) -> int:
        """A check sum of a value; 0 for what is not looked at."""
        kind = type(value)
        if kind in _SIMPLE:
            return self._sum_simple(place, value)
        if depth <= 0 or value is None or id(value) in self._seen or issubclass(kind, types.ModuleType):
            return 0
        if kind.__name__ in _TEXT_OF:
            return hash(
                str(getattr(value, "name", value) if kind.__name__ == "TemporaryDirectory" else value)
            )
        if kind is types.FunctionType:
            defaults = value.__defaults__
            return self._sum_all((), defaults, home, 1) if defaults and value.__module__ == home else 0
        if kind in (set, frozenset):  # in no order, so that what they refer to would be met in no order
            simple = [one for one in value if type(one) in _SIMPLE]
            return self._sum_all((), simple, home, 1) if len(simple) <= _MOST else len(simple)
        if kind is dict and any(map(_is_address, value)):
            return 0  # by id(), also of objects that are gone: even its size is another one everywhere
        if kind in (list, tuple, dict):
            if len(value) > _MOST:
                return len(value)
            self._seen.add(id(value))
            if kind is dict:
                return self._sum_items(place, value, home, depth - 1)
            return self._sum_all(place if kind is list else (), value, home, depth - 1)
        if issubclass(kind, type):  # not isinstance, which would ask a proxy for its class
            if type.__getattribute__(value, "__module__") != home:
                return 0
            self._seen.add(id(value))
            return self._sum_items(place, type.__dict__["__dict__"].__get__(value), home, depth - 1)
        space = _namespace(value) if not _is_of_the_library(kind.__module__) else None
        if not space:
            return 0
        self._seen.add(id(value))
        return self._sum_items(place, space, home, depth - 2)

    def _sum_simple(self, place: Place, value: Any) -> int:
        if type(value) is str and 32 <= len(value) < 200 and _has_uuid(value):
            self._uuids.setdefault(value, []).append(place)
            return 3
        if type(value) is str and " at 0x" in value:
            return hash(_without_addresses(value))
        if type(value) is int or type(value) is float:
            if value == self._pid and place and "pid" in str(place[-1]).lower():
                kind = "pid"
            elif _is_address(value):
                return 0
            else:
                kind = self._clocks.kind(value) if value > 60 else ""  # a machine may be up for minutes only
            if kind and (path := _written(place)):
                self._again.append(f"{kind} {path}")
                return 1
        return hash(value) if value == value else 2  # the hash of nan is its address

    def _sum_all(self, place: Place, values: Iterable[Any], home: str, depth: int) -> int:
        total = 0
        for number, value in enumerate(list(values)):
            inside = (*place, number) if place else ()
            total += hash((self._sum(inside, value, home, depth),))  # in any order
        return total

    def _sum_items(self, place: Place, space: Any, home: str, depth: int) -> int:
        total = 0
        for key, value in list(_items(space)):
            plain = type(key) is str or (type(key) is int and not _is_address(key))
            inside = (*place, key) if place and plain else ()
            total += hash((key if plain else 0, self._sum(inside, value, home, depth)))
        return total


def differing(here: dict[str, int], there: dict[str, int]) -> list[str]:
    """The modules whose values are not the same in two processes, in the order of their import."""
    return [name for name, value in here.items() if there.get(name) != value]


def _has_uuid(text: str) -> bool:
    import re

    return re.search(_UUID, text) is not None


def _without_addresses(text: str) -> str:
    import re

    return re.sub(" at 0x[0-9a-f]+", "", text)


def _other_uuid(text: str) -> str:
    import re
    import uuid

    def new(found: re.Match[str]) -> str:
        return str(uuid.uuid4()) if found[1] else uuid.uuid4().hex

    return re.sub(_UUID, new, text)


def checksum(text: str) -> int:
    """The same in every process, unlike hash()."""
    import zlib

    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


# ---- places: a module, a name in it, and keys, attributes or numbers from there on ------------------


def _written(place: Place) -> str:
    """As one line; '' if that is not possible."""
    words = [f"#{word}" if type(word) is int else word for word in place]
    if not all(type(word) is str and word.isprintable() and word for word in words):
        return ""
    return "\t".join(words) if all(type(w) is int or not w.startswith("#") for w in place) else ""


def _find(words: list[str]) -> tuple[Any, Any] | None:
    """The container and the key of a place that was written."""
    module, *keys = [int(word[1:]) if word.startswith("#") else word for word in words]
    found: Any = sys.modules.get(str(module))
    try:
        for key in keys[:-1]:
            found = _get(found, key)
        _get(found, keys[-1])
    except (LookupError, TypeError):
        return None
    return found, keys[-1]


def _get(container: Any, key: Any) -> Any:
    if type(container) in (dict, list):
        return container[key]
    if issubclass(type(container), type):
        return type.__dict__["__dict__"].__get__(container)[key]
    return _namespace(container)[key]


def _set(container: Any, key: Any, value: Any) -> None:
    if type(container) in (dict, list):
        container[key] = value
    elif issubclass(type(container), type):
        setattr(container, key, value)
    else:
        _namespace(container)[key] = value


def _is_of_the_library(module: object) -> bool:
    """The values of the standard library are known: fork_setup.py sets those that need it."""
    return str(module).partition(".")[0] in sys.stdlib_module_names


def _is_address(value: Any) -> bool:
    """id() of an object: another one everywhere, and of no consequence."""
    return type(value) is int and 1 << 32 <= value < 1 << 47


def _items(space: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(space.items()):
        if type(key) is not str or not key.startswith("__") or not key.endswith("__"):
            yield key, value


def _namespace(thing: Any) -> dict[str, Any]:
    """The attributes of an object, without running a property that a class has in place of `__dict__`."""
    if issubclass(type(thing), types.ModuleType):
        space: dict[str, Any] = _OF_A_MODULE.__get__(thing)
        return space
    for kind in type(thing).__mro__:
        slot = kind.__dict__.get("__dict__")
        if slot is not None:
            found = slot.__get__(thing) if type(slot) is types.GetSetDescriptorType else {}
            return found if type(found) is dict else {}
    return {}
