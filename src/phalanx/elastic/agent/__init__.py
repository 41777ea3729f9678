"""Agents, at torch's import path."""

from phalanx.lazy_modules import below

__getattr__ = below(__name__, "server")
