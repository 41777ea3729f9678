"""Names of torch's rendezvous that need etcd's v2 API: they can be imported, and raise an error when used.

etcd has removed that API, and the Python client for it is not maintained. The backend names `etcd` and
`etcd-v2` mean our own rendezvous over the v3 API.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

from phalanx.elastic.rendezvous.rendezvous_backend import RendezvousBackend
from phalanx.errors import RendezvousError

_V2 = "it needs etcd's v2 API, which etcd has removed; use rdzv_backend='etcd', which speaks v3"


def _refuse(what: str, why: str) -> NoReturn:
    raise RendezvousError(f"{what} is not supported: {why}")


class EtcdRendezvousBackend(RendezvousBackend):
    """Not supported."""

    def __init__(
        self, client: Any, run_id: str, key_prefix: str | None = None, ttl: int | None = None
    ) -> None:
        _refuse("EtcdRendezvousBackend", _V2)


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
