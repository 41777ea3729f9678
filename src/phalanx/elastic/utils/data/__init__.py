"""torch.distributed.elastic.utils.data's names; torch is imported when the sampler is used."""

from typing import TYPE_CHECKING

from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.utils.data.elastic_data import CyclingIterator

if TYPE_CHECKING:
    from phalanx.elastic.utils.data.elastic_data import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]


def __getattr__(name: str) -> object:
    from phalanx.elastic.utils.data import elastic_data as torch_data

    if name in __all__:
        return getattr(torch_data, name)
    return found_in(__name__, "cycling_iterator", "elastic_distributed_sampler")(name)
