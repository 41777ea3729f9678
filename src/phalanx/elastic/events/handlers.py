"""torch.distributed.elastic.events.handlers's names."""

from phalanx.observe.events import get_logging_handler

__all__ = ["get_logging_handler"]
