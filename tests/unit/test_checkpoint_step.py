"""The step at which all ranks of a preempted job save."""

from __future__ import annotations

import pytest

from phalanx.core.checkpoint_step import RankPace, checkpoint_step


@pytest.mark.parametrize(
    ("asked", "took", "step"),
    [
        ([], 0.0, 0),  # at the first call
        ([RankPace(7, 0.0)], 0.0, 9),  # its pace is not known
        ([RankPace(7, 20.0), RankPace(8, 20.0)], 0.1, 10),  # slow steps: the one after the next
        ([RankPace(100, 0.01), RankPace(90, 0.5)], 0.0, 202),  # the fastest, for a second
        ([RankPace(100, 0.01)], 0.5, 302),  # and for as long as the others took, twice
        ([RankPace(0, 0.0), RankPace(3, 1.0)], 0.0, 6),
    ],
)
def test_it_is_ahead_of_all_ranks(asked: list[RankPace], took: float, step: int) -> None:
    assert checkpoint_step(asked, took) == step
