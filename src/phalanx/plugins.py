"""Plug-ins by entry point, in Phalanx's groups and in torchrun's."""

from __future__ import annotations

from typing import Any


def load(name: str, *groups: str) -> Any:
    """The object that an installed package offers under this name; ValueError lists the names there are."""
    from importlib.metadata import entry_points

    known = set()
    for group in groups:
        for entry in entry_points(group=group):
            if entry.name == name:
                return entry.load()
            known.add(entry.name)
    there = f"there are {', '.join(sorted(known))}" if known else "no installed package offers any"
    raise ValueError(f"{name!r} is not an entry point of {' or '.join(groups)}; {there}")
