"""Enumerations whose members are texts.

`enum.StrEnum` is Python 3.11's; this one is the same on every version.
"""

from __future__ import annotations

from enum import Enum


class TextEnum(str, Enum):
    """A member is its value: in comparisons, in JSON and in formatted text."""

    __str__ = str.__str__
