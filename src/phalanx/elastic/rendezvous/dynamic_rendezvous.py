"""The elastic rendezvous over a third party's `RendezvousBackend`, under torch's names.

Rounds, spares, re-forming and closing are those of `cluster.elastic`; only the store is another one
(`store.embedded.blob_client`). The nodes of a round share the store that the caller gives, under a prefix
per round.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from phalanx.cluster.elastic import ElasticInfo, ElasticRendezvous
from phalanx.cluster.handler import RendezvousParameters
from phalanx.cluster.settings import Settings
from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.rendezvous.rendezvous_backend import RendezvousBackend, Token

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.cluster.listener import Meeting

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]


def _positive(name: str, value: timedelta | None, default: float) -> timedelta:
    chosen = timedelta(seconds=default) if value is None else value
    if chosen <= timedelta(0):
        raise ValueError(f"RendezvousTimeout: {name}={chosen}: must be above zero")
    return chosen


class RendezvousTimeout:
    """How long the steps of a rendezvous may take."""

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self._join = _positive("join", join, 600)
        self._last_call = _positive("last_call", last_call, 30)
        self._close = _positive("close", close, 30)
        self._heartbeat = _positive("heartbeat", heartbeat, 5)
        self.last_call_given = last_call is not None  # else ours, which is shorter

    @property
    def join(self) -> timedelta:
        """For enough nodes to come."""
        return self._join

    @property
    def last_call(self) -> timedelta:
        """For further nodes, once there are enough."""
        return self._last_call

    @property
    def close(self) -> timedelta:
        """For the end to be announced."""
        return self._close

    @property
    def heartbeat(self) -> timedelta:
        """For a keep-alive to be answered."""
        return self._heartbeat


@dataclass(frozen=True)
class RendezvousSettings:
    """The settings of a dynamic rendezvous, as torch names them."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
    cas_backoff_max_seconds: float = 0.0


class DynamicRendezvousHandler(ElasticRendezvous):
    """A handler over a backend; made by `from_backend` or `create_handler`."""

    def __init__(self, node: Settings, settings: RendezvousSettings, store: Any) -> None:
        super().__init__(node)
        self._described, self._store = settings, store

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = 5,
        keep_alive_max_attempt: int = 3,
        cas_backoff_max_seconds: float = 0.0,
    ) -> DynamicRendezvousHandler:
        """A handler for a run; it is lost after `keep_alive_max_attempt` intervals without a keep-alive."""
        params = RendezvousParameters(
            backend.name,
            "",
            run_id,
            min_nodes,
            max_nodes,
            local_addr,
            keep_alive_interval=keep_alive_interval,
            keep_alive_max_attempt=keep_alive_max_attempt,
            cas_backoff_max_seconds=cas_backoff_max_seconds,
        )
        return cls._made_over(backend, store, params, timeout or RendezvousTimeout())

    @classmethod
    def _made_over(
        cls, backend: RendezvousBackend, store: Any, params: RendezvousParameters, timeout: RendezvousTimeout
    ) -> DynamicRendezvousHandler:
        interval = params.get_as_int("keep_alive_interval", 5) or 5
        attempts = params.get_as_int("keep_alive_max_attempt", 3) or 3
        config = {
            **params.config,
            "join_timeout": timeout.join.total_seconds(),
            "keep_alive_interval": interval,
            "keep_alive_max_attempt": attempts,
        }
        if timeout.last_call_given:
            config["last_call_timeout"] = timeout.last_call.total_seconds()
        run, least, most = params.run_id, params.min_nodes, params.max_nodes
        if not run:
            raise ValueError("the run id is empty; give the job one")
        checked = RendezvousParameters(backend.name, "", run, least, most, params.local_addr, **config)
        node = Settings(checked, backend)
        every = timedelta(seconds=interval)
        described = RendezvousSettings(run, least, most, timeout, every, attempts, node.cas_backoff)
        return cls(node, described, store)

    @property
    def settings(self) -> RendezvousSettings:
        """What the handler was made with."""
        return self._described

    def shutdown(self) -> bool:
        """End the job for all nodes, even if this one has not joined it, and close everything."""
        if not self.is_closed():
            self.set_closed()
        return super().shutdown()

    def info(self, meeting: Meeting) -> ElasticInfo:
        """A round in torch's form, with the caller's store under a prefix of its own."""
        from phalanx.cluster.torch_store_adapter import prefixed

        prefix = f"phalanx.rendezvous.{self.get_run_id()}.{meeting.round.number}"
        return ElasticInfo(meeting, prefixed(self._store, prefix), self._slots)


def create_handler(
    store: Any, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """A handler over `backend`, with the time-outs in `params.config`."""

    def seconds(key: str) -> timedelta | None:
        value = params.get_as_int(key)
        return None if value is None else timedelta(seconds=value)

    timeout = RendezvousTimeout(
        seconds("join_timeout"),
        seconds("last_call_timeout"),
        seconds("close_timeout"),
        seconds("heartbeat_timeout"),
    )
    return DynamicRendezvousHandler._made_over(backend, store, params, timeout)


__getattr__ = found_in(__name__)
