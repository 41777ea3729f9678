"""How long a client waits for an answer before it looks for another connection."""

from __future__ import annotations

import pytest

from phalanx.store.embedded.answer_time import SHORTEST, AnswerTime

# (the longest that can be afforded, answers so far, misses since, seconds)
CASES = [
    (3.0, [], 0, 0.5),
    (3.0, [0.001] * 50, 0, 0.5),
    (3.0, [0.4], 0, 0.8),
    (3.0, [2.0], 0, 3.0),
    (3.0, [], 1, 0.75),
    (3.0, [], 2, 1.0),
    (3.0, [], 10_000, 1.0),
    (3.0, [0.4], 10_000, 1.6),
    (1.0, [], 0, SHORTEST),
    (5.0, [], 0, 5.0 / 6),
]


@pytest.mark.parametrize(("longest", "answers", "misses", "seconds"), CASES)
def test_the_time_follows_the_answers(
    longest: float, answers: list[float], misses: int, seconds: float
) -> None:
    time = AnswerTime(longest)
    for took in answers:
        time.answered(took)
    for _ in range(misses):
        time.missed()
    assert time.seconds == pytest.approx(seconds)


def test_a_slow_answer_is_forgotten_and_an_answer_ends_the_misses() -> None:
    time = AnswerTime(3.0)
    time.answered(0.5)
    assert time.seconds == pytest.approx(1.0)
    for _ in range(40):
        time.answered(0.001)
    assert time.seconds == pytest.approx(0.5)
    time.missed()
    time.answered(0.001)
    assert time.seconds == pytest.approx(0.5)
