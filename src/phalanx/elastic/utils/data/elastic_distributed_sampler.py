"""torch.distributed.elastic.utils.data.elastic_distributed_sampler's names; imports torch on first use."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.elastic.utils.data.elastic_data import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phalanx.elastic.utils.data import elastic_data as torch_data

    return getattr(torch_data, name)
