"""torch.distributed.elastic.utils.logging's names."""

from phalanx.elastic.utils.functions import get_log_level, get_logger

__all__ = ["get_log_level", "get_logger"]
