"""How long the evidence of a hang is waited for: while it can still come, and no longer.

A verdict is due within a second of the detection. On an overloaded machine a rank or a node may need longer
to answer, and a verdict without it is worth less than one that comes later. So whoever has not answered by
`RANK` or `NODE` is waited for only if something shows that it is late, not absent:

    rank      stopped, exited             no wait at all
              has begun to answer, or is
              held by a debugger          until RANK_BUSY
              a thread of it, or of the
              helper that passes the
              question on, is ready to
              run and gets no processor   until RANK_BUSY
              anything else               until RANK: asleep, in the kernel, or busy with something else
    node      has acknowledged the hang   until NODE_BUSY: its ranks are late
              this node was late itself   until NODE_BUSY: both may be on a busy machine
              its ranks may progress      until NODE_BUSY: then it is not a hang, and a restart is the dearer
                                          mistake
              anything else               until NODE: it is frozen, or cut off

All times are seconds since the detection. Time in which this node did not get to look does not count: nothing
has been asked then, or answers wait to be read.
"""

from __future__ import annotations

from phalanx.core.record import Record

RANK, RANK_BUSY = 0.6, 2.0
NODE, NODE_BUSY = 0.9, 3.0
LATE = 0.3
"""Ranks that answered later than this were on a busy machine: the handlers are C code."""
_FED = 0.5
"""The share of a processor from which on a thread that is ready to run is running: it does something else."""


class SilentRank(Record):
    """A rank that was asked and has not answered completely."""

    state: str = "S"
    """Of its process, as in /proc: T is stopped, t held by a debugger; empty if it has exited."""
    begun: bool = False
    """A part of its answer has arrived."""
    threads: tuple[tuple[str, float | None], ...] = ()
    """Of it and of the helper that passes the question on: the state of each, and the share of a processor
    that it got since the last look; None: not known."""


def is_rank_awaited(waited: float, rank: SilentRank) -> bool:
    """Whether a rank may still answer, `waited` seconds after it was asked."""
    if rank.state in ("", "T", "Z", "X"):
        return False
    if waited < RANK:
        return True
    starved = any(state == "R" and (share is None or share < _FED) for state, share in rank.threads)
    return waited < RANK_BUSY and (rank.begun or rank.state == "t" or starved)


def is_node_awaited(waited: float, *, acknowledged: bool, took: float, may_progress: bool) -> bool:
    """Whether a node may still report; `took`: how late this node was itself."""
    if waited < NODE:
        return True
    return waited < NODE_BUSY and (acknowledged or took >= LATE or may_progress)
