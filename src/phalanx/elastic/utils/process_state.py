"""torch.distributed.elastic.utils.process_state's names."""

from phalanx.agent.workers.process_state import is_uninterruptible_state, read_proc_state

__all__ = ["is_uninterruptible_state", "read_proc_state"]
