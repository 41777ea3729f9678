"""`phalanx restart RUN`; see control.py."""

from __future__ import annotations

from phalanx.cli.control import restart as main

__all__ = ["main"]
