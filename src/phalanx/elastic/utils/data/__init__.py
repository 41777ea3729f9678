"""torch.distributed.elastic.utils.data's names; torch is imported when the sampler is used."""

from typing import TYPE_CHECKING

from phalanx.integrations.torch_data import CyclingIterator
from phalanx.lazy_modules import below

if TYPE_CHECKING:
    from phalanx.integrations.torch_data import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]


def __getattr__(name: str) -> object:
    from phalanx.integrations import torch_data

    if name in __all__:
        return getattr(torch_data, name)
    return below(__name__, "cycling_iterator", "elastic_distributed_sampler")(name)
