"""Durations as text."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`0.013 s`, `12.3 s`, `4 min 07 s`, `3 h 05 min`."""
    seconds = max(0.0, seconds)  # two clocks, or one that was set back
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
