"""Agents, at torch's import path."""

from phalanx.elastic.lazy_modules import below

__getattr__ = below(__name__, "elastic_launch", "server")
