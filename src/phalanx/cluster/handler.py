"""What the agent asks of a rendezvous, with torch's names, so that handlers written for torch still fit.

A handler that derives from torch's own class is adapted (`adapted`). What `RendezvousHandler` has beyond
torch's methods is optional: the defaults suit a handler that only answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from phalanx import errors
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.cluster.listener import Listener
    from phalanx.cluster.membership import Membership
    from phalanx.core.group.ranks import WorkerRanks


class RendezvousStoreInfo(Record, frozen=False):
    """Where the workers of a round find their store."""

    MASTER_ADDR_KEY = "MASTER_ADDR"
    MASTER_PORT_KEY = "MASTER_PORT"

    def __init__(self, master_addr: str, master_port: int) -> None:
        self.master_addr = master_addr
        self.master_port = master_port

    @staticmethod
    def build(
        rank: int, store: Any, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Rank 0 publishes its address and port through `store`; the others read them."""
        if rank == 0:
            from phalanx.job.address import free_port, own_address

            address = local_addr or own_address()
            port = server_port or free_port()
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, address.encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port).encode())
        addr, told_port = (
            value if isinstance(value, str) else bytes(value).decode()
            for value in map(
                store.get, (RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY)
            )
        )
        return RendezvousStoreInfo(addr, int(told_port))


class RendezvousInfo:
    """A round as this node sees it.

    Beyond torch's properties, where the handler knows them: the number of the `round`, the restarts used by
    the job (`attempt`), the ranks of this node's workers, and what serves the workers' store here.
    """

    round = 0
    attempt = 0
    served: Any = None

    @property
    def worker_ranks(self) -> list[WorkerRanks] | None:
        """The ranks of this node's workers; None: the nodes exchange what determines them."""
        return None

    def __init__(
        self, store: Any, rank: int, world_size: int, bootstrap_store_info: RendezvousStoreInfo | None
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> Any:
        """Shared by the nodes of the round; None where there is only one node."""
        return self._store

    @property
    def rank(self) -> int:
        """This node's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of nodes."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """Where the workers' store is, when the handler serves it."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """Forms the nodes of a job into rounds.

    `immediate`: no method ever waits, so that the agent calls them without a thread. `watches`: the handler
    reports changes of membership to its listener, so that the agent does not ask `num_nodes_waiting`.
    """

    immediate = False
    watches = False
    node_name = ""
    """This node, as people know it; empty: the machine's name."""
    restarts = 0
    """How many the agent has counted, set before `next_rendezvous`: a job of several nodes has one count."""

    @abstractmethod
    def get_backend(self) -> str:
        """The backend's name."""

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store that an agent serves."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round that this node is part of."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the job is over."""

    @abstractmethod
    def set_closed(self) -> None:
        """Declare the job over."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes wait to be let in."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The job's id."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Close everything that was opened for the rendezvous; True when that worked."""

    # Optional: for handlers that do more than answer.

    def attach(
        self,
        listener: Listener,
        open_meeting: Callable[[str], tuple[Any, int]],
        *,
        slots: int,
        role: str,
        max_restarts: int | None,
    ) -> Membership | None:
        """A membership that reports everything as it happens; None: this handler is asked."""
        return None

    def leave(self) -> None:
        """This node goes; the job goes on."""
        return


class TorchHandler(RendezvousHandler):
    """Adapts a handler that derives from torch's class."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def get_backend(self) -> str:
        return str(self._handler.get_backend())

    @property
    def use_agent_store(self) -> bool:
        return bool(getattr(self._handler, "use_agent_store", False))  # torch added it in 2.4

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            info = self._handler.next_rendezvous()
        except Exception as error:
            ours = getattr(errors, type(error).__name__, None)  # torch's exceptions have the same names
            if ours is None or not issubclass(ours, errors.RendezvousError):
                raise
            raise ours(str(error)) from error
        where = info.bootstrap_store_info
        if where is not None:
            where = RendezvousStoreInfo(where.master_addr, where.master_port)
        return RendezvousInfo(info.store, info.rank, info.world_size, where)

    def is_closed(self) -> bool:
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        return int(self._handler.num_nodes_waiting())

    def get_run_id(self) -> str:
        return str(self._handler.get_run_id())

    def shutdown(self) -> bool:
        return bool(self._handler.shutdown())


def adapted(handler: Any) -> RendezvousHandler:
    """The handler itself, or what makes one of torch's fit."""
    return handler if isinstance(handler, RendezvousHandler) else TorchHandler(handler)


class RendezvousParameters:
    """What a handler is made from."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("rendezvous backend: name one (phalanx, static, etcd)")
        if min_nodes < 1:
            raise ValueError(f"min_nodes={min_nodes}: a job needs at least one node")
        if max_nodes < min_nodes:
            raise ValueError(f"max_nodes={max_nodes}: smaller than min_nodes={min_nodes}")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = kwargs

    def get(self, key: str, default: Any = None) -> Any:
        """A setting from --rdzv-conf."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """A setting as true or false."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        if isinstance(value, str):
            if value.lower() in ("1", "true", "t", "yes", "y"):
                return True
            if value.lower() in ("0", "false", "f", "no", "n"):
                return False
        raise ValueError(f"{key}={value!r}: use true or false")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """A setting as a whole number."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (TypeError, ValueError):
            raise ValueError(f"{key}={value!r}: use a whole number") from None

    def __repr__(self) -> str:
        return (
            f"RendezvousParameters(backend={self.backend!r}, endpoint={self.endpoint!r}, "
            f"run_id={self.run_id!r}, nodes={self.min_nodes}:{self.max_nodes})"
        )
