"""Phalanx runs a group of worker processes, on one machine or many, as one unit.

It assigns the ranks, watches the workers, restarts the group when a worker fails, and reports the root cause.
It does the job of torchrun and torch.distributed.elastic for any framework.

From the shell:

    phalanx run --nproc-per-node 8 --max-restarts 3 train.py

From Python:

    from phalanx import LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(1, 1, nproc_per_node=4), train)("data")   # by global rank

In a worker:

    from phalanx import worker

    worker.heartbeat(step)

The public names:

    LaunchConfig       how to launch a job
    elastic_launch     runs a function or a program as the workers of a job
    run                module: phalanx run from Python (run.main, run.run); torch.distributed.run's names
    worker             module: what a worker may call: heartbeat, ready, section, expires, should_checkpoint …
    PhalanxError       the root of every exception that Phalanx raises; the others are in phalanx.errors

Public as well are the modules at torch's import paths: phalanx.elastic, phalanx.launcher, phalanx.launch and
phalanx.argparse_util. Every other module is internal and may change in any release. docs/api.md describes
each public name with an example.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx import run, worker
    from phalanx.errors import (
        ChildFailedError,
        NodeUnfit,
        PhalanxError,
        ProgramNotExecutableError,
        ProgramNotFoundError,
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousStateError,
        RendezvousTimeoutError,
        SignalException,
        StartError,
        StateError,
        StoreAuthError,
        StoreConnectionError,
        StoreError,
        StoreTimeoutError,
        UnkillableError,
        UsageError,
    )
    from phalanx.launcher.api import LaunchConfig, elastic_launch

__all__ = [
    "ChildFailedError",
    "LaunchConfig",
    "NodeUnfit",
    "PhalanxError",
    "ProgramNotExecutableError",
    "ProgramNotFoundError",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "SignalException",
    "StartError",
    "StateError",
    "StoreAuthError",
    "StoreConnectionError",
    "StoreError",
    "StoreTimeoutError",
    "UnkillableError",
    "UsageError",
    "__version__",
    "elastic_launch",
    "run",
    "worker",
]

_SUBMODULES = ("errors", "run", "worker")

# The module that provides each name which is not an error; the last four still resolve for programs that use
# them, but are documented at torch's import paths only.
_PROVIDERS = {
    "LaunchConfig": "phalanx.launcher.api",
    "elastic_launch": "phalanx.launcher.api",
    "DefaultLogsSpecs": "phalanx.elastic.multiprocessing",
    "Std": "phalanx.elastic.multiprocessing",
    "record": "phalanx.elastic.multiprocessing.errors",
    "start_processes": "phalanx.elastic.multiprocessing",
}


def __getattr__(name: str) -> object:
    """Load a name on first use: importing the package must not delay the first line of user code."""
    if name in _SUBMODULES:
        provider = f"phalanx.{name}"
    elif name in _PROVIDERS:
        provider = _PROVIDERS[name]
    elif name in __all__:
        provider = "phalanx.errors"
    else:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(provider)
    if name in _SUBMODULES:
        return module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
