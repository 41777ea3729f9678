"""`phalanx stop RUN`; see control.py."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli import control
from phalanx.cli.parser import Parser


def make_parser() -> Parser:
    """The options."""
    return control.make_parser("stop", "Stop a running job on all its nodes.")


def main(argv: Sequence[str]) -> int:
    """Ask the agents."""
    return control.act("stop", make_parser().parse_args(argv), everywhere=True)
