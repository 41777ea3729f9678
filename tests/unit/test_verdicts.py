"""What the end of a round, or of the job, is for the group of a node."""

from __future__ import annotations

import pytest

from phalanx.core.group.events import BarrierDone, PeerFailed, RoundFailed, RoundOver
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.participant_events import End
from phalanx.core.rounds.records import ACTIVE, CLOSED, FORMING, Round
from phalanx.core.rounds.verdicts import job_over, round_over

HELD = Round(3, ACTIVE, restarts=1)
NEXT = Round(4, FORMING, restarts=1, reason="other joined")
FAILURE = NodeFailure("exit code 3", delay=2.0, anew=True, ranks=(1,))
CAUSE = ("o", "other", FAILURE.text())
FINAL = ("o", "other", FAILURE._replace(final="it stays").text())
FAILED = NEXT._replace(phase=CLOSED, outcome="failed", cause=CAUSE)
ENDED_BY_OTHER = PeerFailed("other", 3, 1, "exit code 3", final=True)


@pytest.mark.parametrize(
    ("now", "leaving", "drained", "event"),
    [
        (NEXT, "", False, RoundOver(3, "other joined")),
        (NEXT, "SIGTERM", False, RoundOver(3, "SIGTERM")),
        (NEXT, "drained on request", True, RoundFailed("graceful", "drained on request")),
        (NEXT._replace(preempted=("other",)), "", False, RoundOver(3, "other joined", preempted=True)),
        (NEXT._replace(cause=CAUSE), "", False, RoundOver(3, "other joined")),  # of an earlier round
        (
            NEXT._replace(restarts=2, cause=CAUSE),
            "",
            False,
            PeerFailed("other", 3, 2, "exit code 3", delay=2.0, fresh=True, ranks=(1,)),
        ),
        (NEXT._replace(cause=FINAL), "", False, ENDED_BY_OTHER),  # written by a leader that cannot read it
        (FAILED, "", False, ENDED_BY_OTHER),
        (
            NEXT._replace(phase=CLOSED, outcome="closed", reason="closed by a"),
            "",
            False,
            RoundFailed("closed", "closed by a", job_failed=False),
        ),
    ],
)
def test_the_end_of_a_round(now: Round, leaving: str, drained: bool, event: object) -> None:
    assert round_over(HELD, now, leaving, drained) == event


@pytest.mark.parametrize(
    ("end", "event"),
    [
        (End("failed", "why", FAILED, held=3), ENDED_BY_OTHER),
        (End("failed", "why", FAILED), ENDED_BY_OTHER.replace(round=0)),
        (End("succeeded", "why", NEXT, held=3, finished=True), BarrierDone(True, (), 3)),
        (End("left", "why", NEXT, held=3, finished=True), BarrierDone(False, ("the other nodes (why)",), 3)),
        (End("succeeded", "why", NEXT), RoundFailed("closed", "in words", job_failed=False)),
        (End("closed", "why", NEXT, held=3), RoundFailed("closed", "in words", job_failed=False)),
        (End("left", "why", NEXT), RoundFailed("graceful", "why")),
        (End("timeout", "why", NEXT), RoundFailed("timeout", "in words")),
        (End("store", "why", NEXT, held=3), RoundFailed("error", "in words")),
    ],
)
def test_the_end_of_the_job(end: End, event: object) -> None:
    assert job_over(end, "in words") == event
