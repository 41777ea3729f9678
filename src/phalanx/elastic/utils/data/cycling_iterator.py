"""torch.distributed.elastic.utils.data.cycling_iterator's names."""

from phalanx.elastic.utils.data.elastic_data import CyclingIterator

__all__ = ["CyclingIterator"]
