"""Writes documents as YAML: maps, lists, texts, numbers and booleans, which is all that a manifest has.

A text that YAML could take for something else is written in double quotes, whose escapes are JSON's.
"""

from __future__ import annotations

import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/.][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
# What a reader of YAML 1.1 takes for a boolean, a null or a number.
_TAKEN = re.compile(
    r"(?i:y|yes|n|no|true|false|on|off|null)|[-.]|\.(?i:inf|nan)|[-.0-9][-.0-9_eE]*|---|\.\.\."
)
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def documents(found: list[dict[str, Any]]) -> str:
    """A stream of documents."""
    return "---\n".join(_map(one, 0) for one in found)


def _map(found: dict[str, Any], depth: int) -> str:
    return "".join(f"{'  ' * depth}{scalar(key)}:{_value(value, depth)}" for key, value in found.items())


def _value(value: Any, depth: int) -> str:
    """What follows `key:`."""
    if isinstance(value, dict) and value:
        return "\n" + _map(value, depth + 1)
    if isinstance(value, list) and value:
        return "\n" + "".join(_item(one, depth) for one in value)
    return f" {scalar(value)}\n"


def _item(value: Any, depth: int) -> str:
    """An item of a list: `- ` stands where the first key of a map would be indented."""
    if isinstance(value, dict) and value:
        return f"{'  ' * depth}- " + _map(value, depth + 1)[2 * (depth + 1) :]
    assert not isinstance(value, list), "no list of lists is needed"
    return f"{'  ' * depth}- {scalar(value)}\n"


def scalar(value: Any) -> str:
    """A text, a number, a boolean, or something that is empty."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        assert not value, f"{type(value).__name__} is not written"
        return "{}" if isinstance(value, dict) else "[]"
    if _PLAIN.fullmatch(value) and not _TAKEN.fullmatch(value):
        return value
    return '"' + "".join(map(_escaped, value)) + '"'


def _escaped(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    if " " <= char <= "~":
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
