"""torch.distributed.elastic.utils.data.cycling_iterator's names."""

from phalanx.data import CyclingIterator

__all__ = ["CyclingIterator"]
