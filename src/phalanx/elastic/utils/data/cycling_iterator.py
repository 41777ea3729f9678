"""torch.distributed.elastic.utils.data.cycling_iterator's names."""

from phalanx.integrations.torch_data import CyclingIterator

__all__ = ["CyclingIterator"]
