"""torch.distributed.elastic.utils.data.elastic_distributed_sampler's names; importing it imports torch."""

from phalanx.data import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]
