"""The progress line: shown late, redrawn in place, erased, and never where there is no terminal."""

from __future__ import annotations

import io

import pytest

from phalanx.observe.progress_line import PATIENCE, REDRAW, Progress, on_terminal


class Screen(io.StringIO):
    """A terminal that remembers what it was sent."""

    def isatty(self) -> bool:
        return True


def test_short_waits_never_show() -> None:
    screen = Screen()
    line = Progress(screen)
    assert line.limit("nodes", 100.0, None) == PATIENCE
    line.show(100.0 + PATIENCE / 2)
    assert line.limit("", 100.5, None) is None
    line.show(200.0)
    assert screen.getvalue() == ""


def test_a_long_wait_is_shown_redrawn_and_erased() -> None:
    screen = Screen()
    line = Progress(screen)
    line.limit("nodes", 100.0, None)
    line.show(100.0 + PATIENCE)
    assert "nodes (1 s)" in screen.getvalue()
    assert line.limit("nodes", 100.0 + PATIENCE, None) == REDRAW
    line.show(105.0)
    assert "nodes (5 s)" in screen.getvalue()
    assert "\n" not in screen.getvalue()
    line.limit("", 105.1, None)
    assert screen.getvalue().endswith("\r\x1b[K")


def test_a_shorter_sleep_stays_as_it_is() -> None:
    line = Progress(Screen())
    assert line.limit("nodes", 100.0, 0.2) == 0.2
    assert line.limit("nodes", 100.0, 60.0) == PATIENCE


def test_another_wait_starts_anew() -> None:
    screen = Screen()
    line = Progress(screen)
    line.limit("nodes", 100.0, None)
    line.show(110.0)
    assert line.limit("workers", 110.0, None) == PATIENCE
    assert screen.getvalue().endswith("\r\x1b[K")


def test_cleared_for_a_note_and_back_again() -> None:
    screen = Screen()
    line = Progress(screen)
    line.limit("nodes", 100.0, None)
    line.show(101.0)
    line.clear()
    line.clear()
    assert screen.getvalue().count("\r\x1b[K") == 2
    line.show(101.0 + REDRAW)
    assert screen.getvalue().count("nodes") == 2


def test_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert on_terminal(io.StringIO()) is None
    assert on_terminal(None) is None
    assert on_terminal(Screen()) is not None
    monkeypatch.setenv("TERM", "dumb")
    assert on_terminal(Screen()) is None


def test_a_lost_terminal_is_no_error() -> None:
    class Gone(Screen):
        def write(self, text: str) -> int:
            raise OSError(5, "gone")

    line = Progress(Gone())
    line.limit("nodes", 100.0, None)
    line.show(110.0)
    line.clear()
