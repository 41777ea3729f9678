"""Kept state through torch.distributed.checkpoint: its planners, with memory instead of files.

    from phalanx.worker import torch_checkpoint

    step = torch_checkpoint.load(state_dict, "model")        # into these tensors; None: nothing was kept
    torch_checkpoint.save(state_dict, "model", step)

Each rank keeps what it has: its shards of DTensors (FSDP2, tensor parallelism) and its own copy of everything
that is replicated. No rank waits for another, and none can read what another rank kept: a checkpoint that is
to be loaded by another number of ranks belongs on disk. torch is imported when one of these is called.
"""

from __future__ import annotations

import io

from phalanx.worker import api as worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.worker.state.pending_save import PendingSave


def save(state_dict: dict[str, Any], name: str, step: int, *, wait: bool = True) -> PendingSave:
    """`dcp.save` of this rank's part of a state dict into kept state."""
    import torch.distributed.checkpoint as dcp

    writer = _writer(name, step, wait)
    if worker.supervised():
        dcp.save(state_dict, storage_writer=writer, planner=_save_planner(), no_dist=True)
    saved: PendingSave = writer.saved
    return saved


def load(state_dict: dict[str, Any], name: str, step: int | None = None) -> int | None:
    """`dcp.load` of what this rank kept, into the tensors of `state_dict`; its step, or None."""
    import torch.distributed.checkpoint as dcp

    found = worker.kept(name, step)
    if found is None:
        return None
    dcp.load(state_dict, storage_reader=_reader(found.tree), no_dist=True)
    return found.step


def _save_planner() -> Any:
    from torch.distributed.checkpoint.default_planner import (
        DefaultSavePlanner,
        create_default_global_save_plan,
    )

    class RankSavePlanner(DefaultSavePlanner):  # type: ignore[misc]  # torch is optional
        """Everything that this rank has, and nothing of the others: shards are not to be complete."""

        def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
            self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
            return self.global_plan, self.metadata

    return RankSavePlanner()


def _writer(name: str, step: int, wait: bool) -> Any:
    from torch.distributed.checkpoint import StorageWriter
    from torch.distributed.checkpoint.planner import WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from phalanx.worker.state.pending_save import PendingSave

    class KeptWriter(StorageWriter):  # type: ignore[misc]  # torch is optional
        """Collects what is to be written, and keeps it as one tree."""

        def __init__(self) -> None:
            super().__init__()
            self.saved = PendingSave()
            self._data: dict[Any, Any] = {}

        def reset(self, checkpoint_id: Any = None) -> None:
            self._data = {}

        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            pass

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            return plans

        def write_data(self, plan: Any, planner: Any) -> Any:
            results = []
            for item in plan.items:
                value = planner.resolve_data(item)
                is_bytes = item.type == WriteItemType.BYTE_IO
                self._data[item.index] = value.getvalue() if is_bytes else value
                results.append(WriteResult(index=item.index, size_in_bytes=0, storage_data=None))
            future = Future()
            future.set_result(results)
            return future

        def finish(self, metadata: Any, results: list[list[Any]]) -> None:
            tree = {"metadata": metadata, "data": self._data}
            self.saved = worker.keep(name, tree, step, wait=wait)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    return KeptWriter()


def _reader(tree: dict[str, Any]) -> Any:
    from torch.distributed.checkpoint import StorageReader
    from torch.distributed.checkpoint.planner import LoadItemType
    from torch.futures import Future

    class KeptReader(StorageReader):  # type: ignore[misc]  # torch is optional
        """Reads from a tree that KeptWriter made."""

        def reset(self, checkpoint_id: Any = None) -> None:
            pass

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return tree["metadata"]

        def set_up_storage_reader(
            self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any
        ) -> None:
            pass

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            return plans

        def read_data(self, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                value = tree["data"][item.storage_index]
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(value))
                    continue
                places = zip(item.storage_offsets, item.lengths, strict=True)
                part = value[tuple(slice(at, at + size) for at, size in places)]
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
            future = Future()
            future.set_result(None)
            return future

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    return KeptReader()
