"""Phalanx runs a group of worker processes on one or many machines as one unit.

Names are loaded on first use: `import phalanx` itself costs nothing, because the time from the
command to the first line of user code is what people wait for.
"""

from __future__ import annotations

__version__ = "0.1.0"

_WHERE = {
    "start_processes": "phalanx.workers.worker_kinds",
    "Std": "phalanx.logs.specs",
    "DefaultLogsSpecs": "phalanx.logs.specs",
    "record": "phalanx.workers.record",
    "ChildFailedError": "phalanx.errors",
    "SignalException": "phalanx.errors",
    "PhalanxError": "phalanx.errors",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> object:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
