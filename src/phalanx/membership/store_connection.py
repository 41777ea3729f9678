"""Which store an elastic rendezvous talks to: the embedded one with a token, or a real etcd."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.core.store_commands import Notice
    from phalanx.membership.settings import Settings
    from phalanx.store.embedded.client import Client, State
    from phalanx.store.embedded.token import Token


def find_secret(settings: Settings) -> Token | None:
    """The agents' token; etcd has its own ways to know who may come in."""
    if settings.backend == "etcd":
        return None
    from phalanx.store.embedded.token import FILE_VARIABLE, find_token

    return find_token({FILE_VARIABLE: settings.token_file} if settings.token_file else None)


def connect(
    settings: Settings,
    token: Token | None,
    *,
    on_state: Callable[[State], None],
    on_notice: Callable[[Notice], None],
    clock: Callable[[], float],
) -> Client:
    """A client on its way to the store: `on_state` says when it is there."""
    from phalanx.errors import StoreTimeoutError
    from phalanx.store.embedded.client import Client

    common: dict[str, Any] = {
        "grace": settings.options.join_timeout,
        # With time for another try before the lease is over.
        "patience": min(5.0, max(1.0, settings.options.ttl / 2)),
        "on_state": on_state,
        "on_notice": on_notice,
        "clock": clock,
    }
    client: Client
    if settings.backend == "etcd":
        from phalanx.store.etcd.client import etcd_client_from

        client = etcd_client_from(settings.endpoint, settings.params.config, **common)
    else:
        client = Client(settings.host, settings.port, token=token, tls=settings.tls, **common)
    try:
        client.connect(0)
    except StoreTimeoutError:
        pass  # as expected: nobody waits for it here
    return client
