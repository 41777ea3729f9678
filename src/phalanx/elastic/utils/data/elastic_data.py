"""Data for elastic training: an iterator over epochs, and a sampler that continues within an epoch.

torch is imported only when the sampler is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    ElasticDistributedSampler: Any

T = TypeVar("T")


class CyclingIterator(Iterator[T], Generic[T]):
    """The items of epoch `start_epoch`, then of the next one, up to but not including epoch `n`."""

    def __init__(self, n: int, generator_fn: Callable[[int], Iterator[T]], start_epoch: int = 0) -> None:
        self._n = n
        self._epoch = start_epoch
        self._generator_fn = generator_fn
        self._items = generator_fn(start_epoch)

    def __iter__(self) -> CyclingIterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            try:
                return next(self._items)
            except StopIteration:
                if self._epoch >= self._n - 1:
                    raise
            self._epoch += 1
            self._items = self._generator_fn(self._epoch)


def __getattr__(name: str) -> object:
    if name == "ElasticDistributedSampler":
        return _sampler()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _sampler() -> object:
    """Make the class on first use: its base is torch's."""
    made = globals().get("ElasticDistributedSampler")
    if made is not None:
        return made
    import math

    import torch
    from torch.utils.data.distributed import DistributedSampler

    class ElasticDistributedSampler(DistributedSampler):  # type: ignore[misc,type-arg,unused-ignore]
        """The part of a shuffled dataset that belongs to this rank, from item `start_index` on.

        `start_index` counts items of the whole epoch, so it does not depend on the number of replicas.
        """

        def __init__(
            self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, start_index: int = 0
        ) -> None:
            super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
            size = len(dataset)
            if start_index >= size:
                raise ValueError(f"start_index={start_index}: the dataset has only {size} items")
            self.start_index = start_index
            self._size = size
            self.num_samples = math.ceil((size - start_index) / self.num_replicas)
            self.total_size = self.num_samples * self.num_replicas

        def __iter__(self) -> Iterator[int]:
            random = torch.Generator()
            random.manual_seed(self.epoch)
            left = torch.randperm(self._size - self.start_index, generator=random)
            indices = [self.start_index + int(i) for i in left]
            # Every rank gets the same number: the first items fill up the rest.
            missing = self.total_size - len(indices)
            indices += (indices * (missing // len(indices) + 1))[:missing]
            return iter(indices[self.rank : self.total_size : self.num_replicas])

        def __len__(self) -> int:
            return int(self.num_samples)

    ElasticDistributedSampler.__module__ = __name__
    ElasticDistributedSampler.__qualname__ = "ElasticDistributedSampler"
    globals()["ElasticDistributedSampler"] = ElasticDistributedSampler
    return ElasticDistributedSampler
