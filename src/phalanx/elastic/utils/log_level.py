"""torch.distributed.elastic.utils.log_level's names."""

from phalanx.elastic.utils.functions import get_log_level

__all__ = ["get_log_level"]
