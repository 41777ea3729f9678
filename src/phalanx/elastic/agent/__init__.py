"""Agents, at torch's import path."""

from phalanx.torch_paths import below

__getattr__ = below(__name__, "server")
