"""Whether what a command prints has its schema, and nothing that the schema leaves out."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from phalanx.observe.schemas import TYPES


def conforming(name: str, text: str) -> Any:
    """The value, which has this schema."""
    value = json.loads(text)
    again = msgspec.to_builtins(msgspec.convert(value, TYPES[name][1]))
    missing = _missing(value, again, name)
    assert missing == [], missing
    return value


def _missing(value: Any, again: Any, where: str) -> list[str]:
    """What a value has, and its copy by the schema has not."""
    if isinstance(value, dict):
        gone = [f"{where}.{key}" for key in value.keys() - again.keys()]
        inner = [_missing(value[key], again[key], f"{where}.{key}") for key in value.keys() & again.keys()]
        return [*gone, *(one for found in inner for one in found)]
    if isinstance(value, list):
        pairs = zip(value, again, strict=True)
        return [one for n, (a, b) in enumerate(pairs) for one in _missing(a, b, f"{where}[{n}]")]
    return [] if value == again else [f"{where}: {value!r} {again!r}"]
