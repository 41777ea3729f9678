"""Notices when an import reads what belongs to the script: sys.argv, and `__main__`'s name of its file.

A helper imports before there is a script. Runs in the environment under test: standard library only.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from phalanx.helpers.preload.import_effects import as_in_a_script

# Attributes of `__main__` that name the script, and modules of the standard library that look at them in all
# modules without keeping what they see.
_OF_THE_SCRIPT = ("__file__", "__cached__", "__doc__", "__loader__", "__package__")
_ONLOOKERS = (
    "inspect.py",
    "pkgutil.py",
    "traceback.py",
    "linecache.py",
    "pickle.py",
    "doctest.py",
    "warnings.py",
)

reads: list[str] = []


class noting_reads(as_in_a_script):
    """As in a preload; in addition, the reads are noted."""

    def __init__(self) -> None:
        super().__init__(reads)

    def __enter__(self) -> None:
        super().__enter__()
        sys.modules["__main__"].__class__ = _Main


class _Main(types.ModuleType):
    """The class of `__main__` while modules are imported; reads of the script's name are noted."""

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_THE_SCRIPT:
            reader = sys._getframe(1).f_code.co_filename
            if not reader.startswith("<frozen") and os.path.basename(reader) not in _ONLOOKERS:
                reads.append(f"reads __main__.{name}")
        return types.ModuleType.__getattribute__(self, name)
