"""The rendezvous of a job that has one node: it is complete before it begins.

No thread, no store, no socket: what a single machine does not need, it does not pay for.
"""

from __future__ import annotations

from phalanx.cluster.handler import RendezvousHandler, RendezvousInfo
from phalanx.errors import RendezvousClosedError
from phalanx.job.environment import shares_store


class SoloRendezvous(RendezvousHandler):
    """Every round is this node alone."""

    immediate = True
    watches = True

    def __init__(self, run_id: str, backend: str = "phalanx", node_name: str = "") -> None:
        self._run_id = run_id
        self.node_name = node_name
        self._backend = backend
        self._closed = False

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        return shares_store()

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"the rendezvous of run {self._run_id} is closed")
        return RendezvousInfo(None, 0, 1, None)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True
