"""How long the store may take to answer before its client looks for another connection.

A connection can die without a word: a firewall forgets it, a link is cut. Only a missing answer shows that,
and how long to wait for one is a compromise: a lease goes on meanwhile, and a store that is busy must not be
asked to shake hands again and again, although that is all that too short a time costs. So the time follows
what answers have taken lately, starts as a small part of what the caller can afford (`longest`), and grows
with every try in a row that was not answered.
"""

from __future__ import annotations

SHORTEST = 0.25  # seconds; less is noise on a machine that is busy
PART = 6  # of the longest time, for a store that has not been slow
MARGIN = 2.0  # times what answers take
GROWTH, MOST = 1.5, 2.0  # per try that was not answered, and of all of them
_FADING = 0.9  # per answer, of the slowest one before it


class AnswerTime:
    """What is known about the time of answers."""

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self._slowest = 0.0
        self._misses = 0

    def answered(self, took: float) -> None:
        """An answer came after so many seconds."""
        self._slowest = max(took, self._slowest * _FADING)
        self._misses = 0

    def missed(self) -> None:
        """None came in time, nor did a connection open in time."""
        self._misses = min(self._misses + 1, 10)

    @property
    def seconds(self) -> float:
        """How long to wait for an answer, or for a connection to open."""
        usual = max(SHORTEST, self.longest / PART, MARGIN * self._slowest)
        return min(self.longest, usual * min(MOST, GROWTH**self._misses))
