"""Names of torch's rendezvous that are not supported: they can be imported, and raise an error when used.

A `RendezvousBackend` offers get and set of one blob. A rendezvous on top of it has to poll, and rewrites a
blob that grows with the number of nodes; Phalanx uses watches. A plug-in belongs one level
higher: write a `RendezvousHandler` and offer it as an entry point (see `registry`). etcd's v2 API was removed
from etcd itself. The plain settings are real, so that code which only passes them around works.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from phalanx.errors import RendezvousError

_BLOB = "it polls one blob; use rdzv_backend='phalanx', or write a RendezvousHandler as a plug-in"
_V2 = "it needs etcd's v2 API, which etcd has removed; use rdzv_backend='etcd', which speaks v3"


def _refuse(what: str, why: str) -> NoReturn:
    raise RendezvousError(f"{what} is not supported: {why}")


class RendezvousBackend(ABC):
    """torch's interface of a blob that nodes read and write; can be subclassed, not used here."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Any] | None:
        """The blob and its token."""

    @abstractmethod
    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Replace the blob, if the token is still its own."""


class C10dRendezvousBackend(RendezvousBackend):
    """Not supported."""

    def __init__(self, store: Any, run_id: str) -> None:
        _refuse("C10dRendezvousBackend", _BLOB)


class EtcdRendezvousBackend(RendezvousBackend):
    """Not supported."""

    def __init__(
        self, client: Any, run_id: str, key_prefix: str | None = None, ttl: int | None = None
    ) -> None:
        _refuse("EtcdRendezvousBackend", _V2)


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
        self.join = _positive("join", join, 600)
        self.last_call = _positive("last_call", last_call, 30)
        self.close = _positive("close", close, 30)
        self.heartbeat = _positive("heartbeat", heartbeat, 5)


@dataclass(frozen=True)
class RendezvousSettings:
    """The settings of torch's dynamic rendezvous."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int


class DynamicRendezvousHandler:
    """Not supported: it is made from a `RendezvousBackend`."""

    def __init__(
        self, node: Any, settings: RendezvousSettings, backend_name: str, store: Any, state_holder: Any
    ) -> None:
        _refuse("DynamicRendezvousHandler", _BLOB)

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
    ) -> NoReturn:
        """Not supported."""
        _refuse("DynamicRendezvousHandler.from_backend", _BLOB)


def create_dynamic_handler(store: Any, backend: RendezvousBackend, params: Any) -> NoReturn:
    """Not supported."""
    _refuse("dynamic_rendezvous.create_handler", _BLOB)


def create_c10d_backend(params: Any) -> NoReturn:
    """Not supported."""
    _refuse("c10d_rendezvous_backend.create_backend", _BLOB)


def create_etcd_backend(params: Any) -> NoReturn:
    """Not supported."""
    _refuse("etcd_rendezvous_backend.create_backend", _V2)


class EtcdRendezvousRetryableFailure(Exception):  # torch's name
    """Never raised here."""


class EtcdRendezvousRetryImmediately(Exception):  # torch's name
    """Never raised here."""


class EtcdRendezvous:
    """Not supported."""

    def __init__(
        self,
        client: Any,
        prefix: Any,
        run_id: Any,
        num_min_workers: Any,
        num_max_workers: Any,
        timeout: Any,
        last_call_timeout: Any,
    ) -> None:
        _refuse("EtcdRendezvous", _V2)


class EtcdRendezvousHandler:
    """Not supported."""

    def __init__(self, rdzv_impl: Any, local_addr: str | None) -> None:
        _refuse("EtcdRendezvousHandler", _V2)


class EtcdStore:
    """Not supported."""

    def __init__(self, etcd_client: Any, etcd_store_prefix: Any, timeout: timedelta | None = None) -> None:
        _refuse("EtcdStore", _V2)


class EtcdServer:
    """Not supported."""

    def __init__(self, data_dir: str | None = None) -> None:
        _refuse("EtcdServer", "start etcd yourself (`etcd --data-dir DIR`), and name it as the endpoint")


def create_etcd_v2_handler(params: Any) -> NoReturn:
    """Not supported."""
    _refuse("etcd_rendezvous.create_rdzv_handler", _V2)
