"""`phalanx restart RUN`; see control.py."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli import control
from phalanx.cli.parser import Parser


def make_parser() -> Parser:
    """The options."""
    return control.make_parser("restart", "Restart the workers of a running job.")


def main(argv: Sequence[str]) -> int:
    """Ask the agents."""
    return control.act("restart", make_parser().parse_args(argv), everywhere=False)
