"""The worker API: progress, deadlines and preemption. Outside Phalanx, every call does nothing.

    from phalanx import worker

    model = build()                      # imports, model, warm-up: a standby does this in advance,
    worker.wait_for_rank()               # and waits here for its rank; elsewhere this returns at once
    worker.ready()                       # set-up is done; --startup-timeout no longer applies
    for step, batch in enumerate(data):
        with worker.section("step"), worker.expires(60):
            train(batch)
        worker.heartbeat(step)           # --heartbeat-timeout limits the time between two
        if worker.should_checkpoint(step):  # the machine will be taken away; at the same step in all ranks
            save()
            break

State that outlives the worker, in memory that belongs to its agent (docs/state.md):

    worker.keep("model", {"model": model.state_dict(), "step": step}, step=step)
    found = worker.kept("model")         # in the next start of this rank: found.tree, found.step; or None

A function that keeps its process when another rank fails, and is called again (docs/reentry.md):

    @worker.reenter
    def train(round): ...                # round.rank, .world_size, .local_rank, .number, .cause, …

    train()
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.worker.api import (
        agree,
        expires,
        heartbeat,
        keep,
        kept,
        on_preempt,
        ready,
        section,
        should_checkpoint,
        supervised,
        wait_for_rank,
    )
    from phalanx.worker.recorder import record
    from phalanx.worker.reentry.reenter import Reentry, reenter

__all__ = [
    "Reentry",
    "agree",
    "expires",
    "heartbeat",
    "keep",
    "kept",
    "on_preempt",
    "ready",
    "record",
    "reenter",
    "section",
    "should_checkpoint",
    "supervised",
    "wait_for_rank",
]


_ELSEWHERE = {
    "Reentry": "phalanx.worker.reentry.reenter",
    "record": "phalanx.worker.recorder",
    "reenter": "phalanx.worker.reentry.reenter",
}


def __getattr__(name: str) -> object:
    """A public name, loaded at its first use: some modules of this package run before any user code."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_ELSEWHERE.get(name, "phalanx.worker.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
