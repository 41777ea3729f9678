"""The values and random generators that modules have after their import, for a comparison of two processes.

A value that differs was drawn from the system or the clock, or names something that exists only once (a
temporary directory, a key, an identifier). In a fork, all ranks and all restarts would share it.

What is looked at: numbers and text in the modules, in the classes and the defaults of functions defined
there, in containers, and in instances that a module keeps, a few levels deep. No code of the modules runs
meanwhile. Runs in the environment under test: standard library only.
"""

from __future__ import annotations

import os
import re
import sys
import time
import types
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

Place = tuple[Any, ...]

_DEPTH = 4  # a module's dict, an instance, its list, a tuple in it
_MOST = 2000  # elements of one container
_SIMPLE = (str, bytes, int, float, complex, bool)
_TEXT_OF = ("UUID", "datetime", "date", "PosixPath", "TemporaryDirectory")
_UUID = (
    r"(?<![0-9a-f])[0-9a-f]{8}(-?)[0-9a-f]{4}\1[14][0-9a-f]{3}\1[89ab][0-9a-f]{3}\1[0-9a-f]{12}(?![0-9a-f])"
)

_OF_A_MODULE: Any = dict(vars(types.ModuleType))[
    "__dict__"
]  # a lazy module may have an attribute of that name


class Clocks:
    """Recognizes values of clocks that were read since it was made."""

    def __init__(self) -> None:
        self._wall = time.time()
        self._steady = time.monotonic()

    def kind(self, value: float) -> str:
        """wall, steady, wall_ns, steady_ns, seconds; or ''."""
        if value > 1 << 62:
            return ""
        wall, steady = time.time(), time.monotonic()
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


class ImportValues:
    """The values of some modules: check sums for a comparison, and what every worker can make again."""

    def __init__(self, modules: Iterable[str], clocks: Clocks) -> None:
        self.sums: dict[str, dict[str, int]] = {}  # module → name → check sum
        self.again: list[str] = []  # clocks and process numbers: `KIND MODULE NAME`
        self._uuids: dict[str, list[Place]] = {}  # by their text
        self._clocks = clocks
        self._pid = os.getpid()
        self._seen: set[int] = set()
        for name in modules:
            module = sys.modules.get(name)
            if isinstance(module, types.ModuleType):
                self.sums[name] = {
                    key: self._sum((name, key), value, name, _DEPTH)
                    for key, value in _items(_namespace(module))
                }

    def words(self, there: dict[str, dict[str, int]]) -> dict[str, str]:
        """`MODULE NAME` → the value, for those that are not the same in another process."""
        found = {}
        for module, sums in self.sums.items():
            other = there.get(module)
            for key, value in sums.items() if other is not None else ():
                if other is not None and other.get(key) != value:
                    found[f"{module} {key}"] = repr(_namespace(sys.modules[module]).get(key))[:120]
        return found

    def uuids_found(self) -> list[dict[str, Any]]:
        """Each text that looks like a random identifier, its places, and whether these are all of them."""
        self._uuids[f"-{self._pid}"] = []  # to see how many references the loop itself has
        counts = [(sys.getrefcount(text), text, places) for text, places in self._uuids.items()]
        own = counts.pop()[0]
        self._uuids.popitem()
        return [
            {
                "text": text,
                "places": [written(place) for place in places],
                "all": count - own == len(places) and all(map(written, places)),
                "module": places[0][0] if places and places[0] else "",
            }
            for count, text, places in counts
        ]

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
            if kind and (path := written(place)):
                self.again.append(f"{kind} {path}")
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


def _has_uuid(text: str) -> bool:
    return re.search(_UUID, text) is not None


def _without_addresses(text: str) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", text)


def written(place: Place) -> str:
    """As `MODULE NAME.NAME`; '' if that is not possible."""
    if len(place) < 2 or not all(type(word) is str and _WORD.match(word) for word in place[1:]):
        return ""
    return f"{place[0]} {'.'.join(place[1:])}"


_WORD = re.compile(r"[\w-]+\Z")


def _is_of_the_library(module: object) -> bool:
    """The values of the standard library are known: every worker sets those that need it."""
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


# ---- random generators ---------------------------------------------------------------------------


def generators_found(modules: list[str]) -> list[dict[str, Any]]:
    """Every random generator of this process: where it is kept (`MODULE NAME`, or ''), and its state.

    The garbage collector knows them. What belongs to another one (the bit generator of a RandomState) counts
    as part of it.
    """
    made = _generators()
    owned = {id(part) for one in made for part in _parts(one)}
    owned |= _of_temporary_names()
    wanted = {id(one): one for one in made if id(one) not in owned}
    places = _places_of(wanted, modules)
    found = []
    for key, one in wanted.items():
        state = _state_of(one)
        if state is not None:
            text = repr(state).encode()
            kind = f"{type(one).__module__}.{type(one).__qualname__}"
            found.append({"at": places.get(key, ""), "kind": kind, "state": zlib.crc32(text)})
    return found


def _of_temporary_names() -> set[int]:
    """Those that look at the process number themselves: of tempfile, and of multiprocessing's semaphores."""
    import gc

    kind = getattr(sys.modules.get("tempfile"), "_RandomNameSequence", None)
    return {id(getattr(one, "_rng", None)) for one in gc.get_objects() if type(one) is kind}


def _generators() -> list[Any]:
    import gc

    bases = tuple(_classes())
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), bases)] if bases else []
    default = getattr(sys.modules.get("torch._C"), "default_generator", None)  # not known to the collector
    if default is not None and not any(one is default for one in found):
        found.append(default)
    return found


def _classes() -> Iterator[type]:
    for module, names in (
        ("random", ("Random",)),
        ("numpy.random.mtrand", ("RandomState",)),
        ("numpy.random._generator", ("Generator",)),
        ("numpy.random.bit_generator", ("BitGenerator", "SeedSequence")),
        ("torch._C", ("Generator",)),
    ):
        for name in names:
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type):
                yield found


def _parts(generator: Any) -> Iterator[Any]:
    for name in ("_bit_generator", "bit_generator", "seed_seq", "_seed_seq"):
        try:
            part = getattr(generator, name, None)
        except Exception:  # noqa: BLE001 - one without
            part = None
        if part is not None and part is not generator:
            yield part
            yield from _parts(part)


def _places_of(wanted: dict[int, Any], modules: list[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    seen: set[int] = set()

    def walk(place: Place, space: Any, depth: int) -> None:
        for key, value in list(space.items()):
            if type(key) is not str:
                continue
            inside = (*place, key)
            if id(value) in wanted:
                text = written(inside)
                if text and (not found.get(id(value)) or _is_better(text, found[id(value)])):
                    found[id(value)] = text
            elif depth and id(value) not in seen and not issubclass(type(value), types.ModuleType):
                if type(value) in _SIMPLE or value is None:
                    continue
                seen.add(id(value))
                if type(value) is dict:
                    walk(inside, value, depth - 1)
                elif type(value) is types.FunctionType and value.__module__ == place[0]:
                    walk((*inside, "__kwdefaults__"), value.__kwdefaults__ or {}, 0)
                elif issubclass(type(value), type):
                    if type.__getattribute__(value, "__module__") == place[0]:
                        walk(inside, type.__dict__["__dict__"].__get__(value), depth - 1)
                elif not _is_of_the_library(type(value).__module__) and (inner := _namespace(value)):
                    walk(inside, inner, depth - 1)

    for name in ["random", *modules]:
        module = sys.modules.get(name)
        if isinstance(module, types.ModuleType):
            walk((name,), _namespace(module), 3)
    return found


def _is_better(text: str, other: str) -> bool:
    """The shortest way to it, and then the first module."""
    return text.count(".") + len(text) / 1000 < other.count(".") + len(other) / 1000


def _state_of(generator: Any) -> Any:
    """Its state as a value to compare; None if it has none (SystemRandom)."""
    try:
        if hasattr(generator, "getstate"):  # random
            return generator.getstate()
        if hasattr(generator, "entropy"):  # a SeedSequence
            return generator.entropy, generator.spawn_key, generator.n_children_spawned
        if hasattr(generator, "initial_seed"):  # torch; the state itself is a tensor
            return generator.initial_seed(), generator.get_state().tolist()
        if hasattr(generator, "bit_generator"):  # a Generator
            return _plain(generator.bit_generator.state)
        state = generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.state
    except Exception:  # noqa: BLE001 - a subclass without a state
        return None
    return _plain(state)


def _plain(state: Any) -> Any:
    """numpy's states contain arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
