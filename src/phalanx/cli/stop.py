"""`phalanx stop RUN`; see control.py."""

from __future__ import annotations

from phalanx.cli.control import stop as main

__all__ = ["main"]
