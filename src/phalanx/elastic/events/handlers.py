"""The destinations of events, at torch's import path."""

from phalanx.observe.events import get_logging_handler

__all__ = ["get_logging_handler"]
