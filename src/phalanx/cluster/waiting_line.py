"""The line that shows what the nodes wait for: the leader's text, with the remaining time counted down.

The leader keeps it in the job's `status` key, where nodes that wait for a while read it; pure.
"""

from __future__ import annotations

SHOW_AFTER, SHOW_EVERY = 1.0, 10.0
WRITE_AFTER, WRITE_EVERY = 0.3, 5.0  # the leader's: after a change at most this often, and while nodes wait
_LEFT = " s left"


class StatusLine:
    """The text, its time, and when it was last shown or written."""

    def __init__(self, text: str, now: float) -> None:
        self.text, self._at = text, now
        self._waiting_since = now
        self._shown_at: float | None = None
        self._shown = ""
        self._written = ""
        self._written_at = float("-inf")

    def learn(self, text: str, now: float) -> None:
        """Take a new text, as of now."""
        if text != self.text:
            self.text, self._at = text, now

    def words(self, now: float) -> str:
        """The text with the seconds that are left now."""
        if not self.text.endswith(_LEFT):
            return self.text
        before, _, number = self.text.removesuffix(_LEFT).rpartition(" ")
        if not number.isdigit():
            return self.text
        return f"{before} {max(0, round(int(number) - (now - self._at)))}{_LEFT}"

    # For nodes that wait

    def wait(self, now: float) -> None:
        self._waiting_since, self._shown_at = now, None

    @property
    def shown(self) -> bool:
        """Whether this wait has been shown."""
        return self._shown_at is not None

    def show_at(self) -> float | None:
        """When to show it next: again only if it has changed, or counts down."""
        if self._shown_at is None:
            return self._waiting_since + SHOW_AFTER
        unchanged = self.text == self._shown and not self.text.endswith(_LEFT)
        return None if unchanged else self._shown_at + SHOW_EVERY

    def show(self, now: float) -> str:
        self._shown_at, self._shown = now, self.text
        return self.words(now)

    # For the leader

    def write_at(self, forming: bool) -> float | None:
        """When the text has to be written: soon after a change, and while other nodes count down."""
        if self.text != self._written:
            return self._written_at + WRITE_AFTER
        return self._written_at + WRITE_EVERY if forming else None

    def write(self, now: float) -> bytes:
        self._written, self._written_at = self.text, now
        return self.words(now).encode()
