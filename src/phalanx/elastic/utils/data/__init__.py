"""torch.distributed.elastic.utils.data's names; torch is imported when the sampler is asked for."""

from typing import TYPE_CHECKING

from phalanx.data import CyclingIterator

if TYPE_CHECKING:
    from phalanx.data import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]


def __getattr__(name: str) -> object:
    from phalanx import data

    if name in __all__:
        return getattr(data, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
