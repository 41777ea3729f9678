"""A table of findings for a terminal: what was looked at, the value, the verdict, what to do."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence


def table_width() -> int:
    """The width for a table: that of the terminal, within reason."""
    if not sys.stdout.isatty():
        return 100
    return max(60, min(160, shutil.get_terminal_size((100, 24)).columns or 100))


def four_columns(rows: Sequence[tuple[str, str, str, str]], width: int, third: int) -> list[str]:
    """Lines of a table whose first row are its heads; the second and the last column are wrapped."""
    first = max(len(row[0]) for row in rows) + 2
    second = min(40, max(len(row[1]) for row in rows) + 2, width // 3)
    third += 2
    last = max(20, width - first - second - third)
    lines = []
    for number, (name, value, verdict, advice) in enumerate(rows):
        values = textwrap.wrap(value, second - 2, break_on_hyphens=False) or [""]
        advices = textwrap.wrap(advice, last, break_on_hyphens=False) or [""]
        for line in range(max(len(values), len(advices))):
            cells = (
                (name if line == 0 else "").ljust(first),
                (values[line] if line < len(values) else "").ljust(second),
                (verdict if line == 0 else "").ljust(third),
                advices[line] if line < len(advices) else "",
            )
            lines.append("".join(cells).rstrip())
        if number == 0:
            lines.append("-" * min(width, first + second + third + 20))
    return lines
