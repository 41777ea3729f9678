"""When a rank moves, and when it runs outside of collectives."""

from __future__ import annotations

from phalanx.core.diagnosis.collective_progress import CollectiveProgress, RankPulse, marks, moved, observe
from phalanx.core.diagnosis.collectives import GroupTrace, Operation, RankTrace


def sampled(*pulses: tuple[int, bool, float]) -> CollectiveProgress:
    """The progress of a rank sampled every ten seconds, from 10 on: number, waits, processor time."""
    known: dict[int, CollectiveProgress] = {}
    for index, (number, waits, cpu) in enumerate(pulses, 1):
        known = observe(known, [RankPulse(0, (number,), waits, cpu)], 10.0 * index)
    return known[0]


def test_numbers_that_move() -> None:
    assert sampled((1, True, 0.0)).numbers_at == 10.0
    assert sampled((1, True, 0.0), (2, True, 0.0)).numbers_at == 20.0
    assert sampled((1, True, 0.0), (2, True, 0.0), (2, True, 0.0)).numbers_at == 20.0


def test_a_rank_runs_only_outside_of_collectives() -> None:
    assert sampled((1, False, 0.0), (1, False, 9.0)).ran_at == 20.0
    assert sampled((1, False, 0.0), (1, False, 9.0), (1, False, 9.1)).ran_at == 20.0  # then it idles
    assert sampled((1, False, 0.0), (1, False, 0.3)).ran_at == 0.0  # the threads of a library
    assert sampled((1, True, 0.0), (1, True, 9.0)).ran_at == 0.0  # it waits in a busy loop
    assert sampled((1, True, 0.0), (1, False, 9.0)).ran_at == 0.0  # perhaps in a busy loop


def test_a_rank_that_gets_no_processor_runs_if_it_wants_to() -> None:
    known = observe({}, [RankPulse(0)], 10.0)
    assert observe(known, [RankPulse(0, runnable=True)], 20.0)[0].ran_at == 20.0
    assert observe(known, [RankPulse(0, waits=True, runnable=True)], 20.0)[0].ran_at == 0.0


def test_a_rank_that_is_gone_is_forgotten() -> None:
    known = observe({}, [RankPulse(0), RankPulse(1)], 1.0)
    assert observe(known, [RankPulse(1)], 2.0).keys() == {1}


def test_a_rank_that_arrives_while_the_evidence_is_collected_has_moved() -> None:
    def at(number: int, done: bool) -> RankTrace:
        return RankTrace(0, (GroupTrace("0", "", (0, 1), (Operation(number, "all_reduce", done),), number),))

    known = observe({}, [RankPulse(0, marks(at(5, True))), RankPulse(1)], 10.0)
    assert moved(known, {0: at(5, True)}) == set()
    assert moved(known, {0: at(6, False)}) == {0}
    assert moved(known, {0: at(5, False)}) == {0}
    assert moved(known, {1: at(6, False)}) == set()  # it had not answered before
    assert moved(known, {2: at(6, False)}) == set()
