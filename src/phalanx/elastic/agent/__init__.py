"""Agents, at torch's import path."""

from phalanx.elastic.lazy_modules import found_in

__getattr__ = found_in(__name__, "elastic_launch", "server")
