"""Which store an elastic rendezvous talks to: the embedded one with a token, or a real etcd."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.core.commands import Notice
    from phalanx.rendezvous.elastic_settings import Settings
    from phalanx.store.client import Client, State
    from phalanx.store.token import Token


def find_secret(settings: Settings) -> Token | None:
    """The agents' token; etcd has its own ways to know who may come in."""
    if settings.backend == "etcd":
        return None
    from phalanx.store.token import find_token

    return find_token()


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
    from phalanx.store.client import Client

    client: Any = Client(
        settings.host,
        settings.port,
        token=token,
        grace=settings.options.join_timeout,
        patience=min(5.0, max(1.0, settings.options.ttl / 2)),
        on_state=on_state,
        on_notice=on_notice,
        clock=clock,
    )
    try:
        client.connect(0)
    except StoreTimeoutError:
        pass  # as expected: nobody waits for it here
    return client  # type: ignore[no-any-return] # one of two kinds with the same methods
