"""Whether the collectives of ranks progress, from samples of their recorders.

A rank *moves* when it enters or leaves a collective, and it *runs* when it uses a processor while it waits in
none: a long compile, an evaluation on one rank or the writing of a checkpoint are not hangs. What a rank uses
while it waits does not count, because some libraries wait in a busy loop. `core.diagnosis.progress` judges
the result.
"""

from __future__ import annotations

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from phalanx.core.diagnosis.collectives import RankTrace

_RUNS = 0.05
"""The share of one processor from which on a rank runs; the waiting threads of libraries use less."""


class RankPulse(Record):
    """One sample of one rank; `marks` changes whenever it enters or leaves a collective."""

    rank: int
    marks: tuple[object, ...] = ()
    waits: bool = False
    cpu: float = 0.0
    """Seconds of processor time of the rank and its children so far."""
    runnable: bool = False
    """One of them has work to do at this moment, although it may not get a processor."""


class CollectiveProgress(Record):
    """A rank's last sample, and when it last moved or ran."""

    pulse: RankPulse
    sampled_at: float
    numbers_at: float
    ran_at: float = 0.0


def marks(trace: RankTrace) -> tuple[object, ...]:
    """What changes when a rank enters or leaves an operation."""
    return tuple(
        (group.name, group.entered, tuple((one.number, one.peer, one.done) for one in group.operations))
        for group in trace.groups
    )


def observe(
    before: Mapping[int, CollectiveProgress], pulses: Iterable[RankPulse], now: float
) -> dict[int, CollectiveProgress]:
    """The progress of the ranks of a new sample; a rank that is not in it is no longer known."""
    found = {}
    for pulse in pulses:
        old = before.get(pulse.rank)
        if old is None:
            found[pulse.rank] = CollectiveProgress(pulse, now, now)
            continue
        numbers_at = now if pulse.marks != old.pulse.marks else old.numbers_at
        span = now - old.sampled_at
        # It must have been outside at both ends: else the time may have been spent inside.
        outside = not pulse.waits and not old.pulse.waits
        used = span > 0 and pulse.cpu - old.pulse.cpu >= _RUNS * span
        ran = outside and (used or pulse.runnable)
        found[pulse.rank] = CollectiveProgress(pulse, now, numbers_at, now if ran else old.ran_at)
    return found


def moved(progress: Mapping[int, CollectiveProgress], traces: Mapping[int, RankTrace]) -> set[int]:
    """The ranks that have entered or left a collective since they were sampled, by records read later.

    A slow rank may arrive while the evidence of its hang is being collected: then it is not one."""
    known = {rank: one.pulse.marks for rank, one in progress.items() if one.pulse.marks}
    return {rank for rank, trace in traces.items() if rank in known and marks(trace) != known[rank]}
