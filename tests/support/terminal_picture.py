"""A picture of a terminal: what `tmux capture-pane -e` gives, as SVG."""

from __future__ import annotations

import re
from html import escape

_WIDTH, _HEIGHT, _PAD = 8.4, 18, 14  # of a cell, and around all of them
_COLOURS = ("#20252b", "#e5534b", "#57ab5a", "#c69026", "#539bf5", "#b083f0", "#39c5cf", "#909dab")
_BRIGHT = ("#636e7b", "#ff938a", "#6bc46d", "#daaa3f", "#6cb6ff", "#dcbdfb", "#56d4dd", "#cdd9e5")
_TEXT, _GROUND = "#cdd9e5", "#1c2128"


class Pen:
    """How the next characters look."""

    def __init__(self) -> None:
        self.text, self.ground, self.bold, self.line, self.reverse = "", "", False, False, False

    def take(self, codes: str) -> None:
        """One SGR sequence."""
        for code in (int(one or 0) for one in codes.split(";")):
            if code == 0:
                self.__init__()  # type: ignore[misc]  # as it was in the beginning
            elif code in (1, 4, 7):
                self.bold |= code == 1
                self.line |= code == 4
                self.reverse |= code == 7
            elif 30 <= code < 38 or 90 <= code < 98:
                self.text = _COLOURS[code - 30] if code < 40 else _BRIGHT[code - 90]
            elif 40 <= code < 48 or 100 <= code < 108:
                self.ground = _COLOURS[code - 40] if code < 50 else _BRIGHT[code - 100]
            elif code in (39, 49):
                self.text, self.ground = ("", self.ground) if code == 39 else (self.text, "")


def svg(screen: str, columns: int, rows: int) -> str:
    """The lines of a terminal, with their escape sequences, as a picture."""
    width, height = columns * _WIDTH + 2 * _PAD, rows * _HEIGHT + 2 * _PAD
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-size="14" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace">',
        f'<rect width="100%" height="100%" rx="8" fill="{_GROUND}"/>',
    ]
    pen = Pen()
    for row, line in enumerate(screen.split("\n")[:rows]):
        column = 0
        for codes, text in re.findall(r"\x1b\[([0-9;]*)m|([^\x1b]+)", line):
            if not text:
                pen.take(codes)
                continue
            out += _piece(text, column, row, pen)
            column += len(text)
    return "\n".join([*out, "</svg>", ""])


def _piece(text: str, column: int, row: int, pen: Pen) -> list[str]:
    x, y = _PAD + column * _WIDTH, _PAD + row * _HEIGHT
    ground, colour = pen.ground, pen.text or _TEXT
    if pen.reverse:
        ground, colour = colour, ground or _GROUND
    length = len(text) * _WIDTH
    out = (
        [f'<rect x="{x:g}" y="{y:g}" width="{length:g}" height="{_HEIGHT}" fill="{ground}"/>']
        if ground
        else []
    )
    if text.strip():
        bold = ' font-weight="bold"' if pen.bold else ""
        out.append(
            f'<text x="{x:g}" y="{y + 13.5:g}" fill="{colour}" textLength="{length:g}" '
            f'xml:space="preserve"{bold}>{escape(text)}</text>'
        )
    if pen.line:
        out.append(f'<rect x="{x:g}" y="{y + 16:g}" width="{length:g}" height="1" fill="{colour}"/>')
    return out
