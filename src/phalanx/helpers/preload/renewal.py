"""Values that an import makes anew in every process: a fork makes them again.

All forks of one Python would share a random generator that was seeded from the system, an identifier, the
time of the import or a process number. Which packages keep one is part of the list (packages.py).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_UUID = (
    r"(?<![0-9a-f])[0-9a-f]{8}(-?)[0-9a-f]{4}\1[14][0-9a-f]{3}\1[89ab][0-9a-f]{3}\1[0-9a-f]{12}(?![0-9a-f])"
)


class Renewal:
    """What every worker makes again, of the modules that are loaded."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._values: list[tuple[Any, str, str, list[str]]] = []  # owner, attribute, kind, its numbers
        for line in lines:
            *head, module, path = line.split(" ")
            owner: Any = sys.modules.get(module)
            *parts, name = path.split(".")
            for part in parts:
                owner = _get(owner, part)
            if _get(owner, name) is not None:
                self._values.append((owner, name, head[0], head[1:]))

    def apply(self) -> None:
        """In a worker, before the script's first line."""
        uuids: dict[str, str] = {}
        for owner, name, kind, numbers in self._values:
            value = _get(owner, name)
            if kind == "seed":
                _seed_again(value)
            elif kind == "uuid":
                _set(owner, name, uuids.setdefault(value, _other_uuid(value)))
            elif kind == "pid":
                _set(owner, name, os.getpid())
            elif kind == "randint":
                from random import randint

                _set(owner, name, randint(int(numbers[0]), int(numbers[1])))
            else:
                _set(owner, name, _time(kind))


def _get(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)


def _set(owner: Any, name: str, value: object) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _seed_again(generator: Any) -> None:
    if hasattr(generator, "entropy") or hasattr(generator, "seed_seq"):
        # In place, as a fresh process makes it: other objects refer to this one.
        generator.__init__()
    else:
        generator.seed()


def _other_uuid(text: str) -> str:
    import re
    import uuid

    def new(found: re.Match[str]) -> str:
        return str(uuid.uuid4()) if found[1] else uuid.uuid4().hex

    return re.sub(_UUID, new, text)


def _time(kind: str) -> float:
    import time

    if kind == "seconds":
        return int(time.time())
    if kind in ("wall", "steady"):
        return time.time() if kind == "wall" else time.monotonic()
    return time.time_ns() if kind == "wall_ns" else time.monotonic_ns()
