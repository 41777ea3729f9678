"""The connection of a node to its job's store: the embedded one, etcd, or one in a value of a third party."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.cluster.settings import Settings
    from phalanx.core.rounds.store_commands import Notice
    from phalanx.store.embedded.client import Client, State
    from phalanx.store.net.token import Token


def find_secret(settings: Settings) -> Token | None:
    """The agents' token; other stores have their own means, and a static job only a given token."""
    if settings.store != "embedded":
        return None
    from phalanx.job.environment import TOKEN_FILE, variables
    from phalanx.store.net.token import find_token, given_token

    environ = {TOKEN_FILE: settings.token_file} if settings.token_file else variables()
    return given_token(environ) if settings.fixed else find_token(environ)


def awaits_secret(settings: Settings) -> bool:
    """Whether this node has no token that the others could have, too, and should not make one.

    The pods of a job have homes of their own. Where one made a token there, the others would be refused,
    and it would train alone if --nnodes allows that."""
    from phalanx.errors import StoreAuthError
    from phalanx.job.environment import in_pod, variables
    from phalanx.store.net.token import find_token, given_token

    if settings.store != "embedded" or settings.fixed or settings.options.max_nodes == 1 or not in_pod():
        return False
    if settings.token_file or given_token(variables()) is not None:
        return False
    try:
        find_token(make=False)
    except StoreAuthError:
        return True
    return False


NO_SECRET = (
    "no token that all pods of the job have: mount a Secret and name its file with PHALANX_TOKEN_FILE "
    "(`phalanx k8s manifest` writes both)"
)


def connect(
    settings: Settings,
    token: Token | None,
    *,
    on_state: Callable[[State], None],
    on_notice: Callable[[Notice], None],
    clock: Callable[[], float],
    address: tuple[str, int] | None = None,
    grace: float | None = None,
) -> Client:
    """A client that connects in the background: `on_state` reports when it has."""
    from phalanx.errors import StoreError
    from phalanx.store.embedded.client import Client

    common: dict[str, Any] = {
        "grace": settings.options.join_timeout if grace is None else grace,
        # With time for another try before the lease is over.
        "patience": min(5.0, max(1.0, settings.options.ttl / 2)),
        "on_state": on_state,
        "on_notice": on_notice,
        "clock": clock,
    }
    client: Client
    if settings.blob is not None:
        from phalanx.store.embedded.blob_client import BlobClient

        client = BlobClient(settings.blob, **common)
    elif settings.store == "etcd":
        from phalanx.store.etcd.client import etcd_client_from

        client = etcd_client_from(settings.endpoint, settings.params.config, **common)
    else:
        host, port = address or (settings.host, settings.port)
        client = Client(host, port, token=token, tls=settings.tls, **common)
    try:
        client.connect(0)
    except StoreError:
        pass  # not connected yet, or refused already: `on_state` reports either
    return client
