"""The connection of a node to its job's store: the embedded one, etcd, or one in a value of a third party.

One connection at a time; what an earlier one reports is out of date and reaches nobody. Reports and answers
are posted to the owner's queue.
"""

from __future__ import annotations

from phalanx.cluster.clock import clock
from phalanx.errors import StoreError
from phalanx.job.time_budgets import REFUSED, STORE_ANSWER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.cluster.settings import Settings
    from phalanx.core.rounds.store_commands import Command, Notice, Reply
    from phalanx.store.client import State, StoreClient
    from phalanx.store.net.token import Token

_HUNG_CALL = 1.0  # after the time to join: the client reports its own failures by then


class StoreLink:
    """`client` is None until the first `dial`, and after `hang_up`."""

    def __init__(
        self,
        settings: Settings,
        post: Callable[[Callable[[], None]], None],
        on_state: Callable[[State], None],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self._settings, self._post = settings, post
        self._on_state, self._on_notice = on_state, on_notice
        self.client: StoreClient | None = None
        self.operations = 0  # commands sent to the store
        self.dialling_until = 0.0
        self._number = 0  # of this connection
        self._refused_since: float | None = None

    def dial(self, token: Token | None, patience: float, address: tuple[str, int] | None) -> None:
        """Connect in the background; `address`: of a store that this node serves."""
        self._number += 1
        self.dialling_until, self._refused_since = clock() + patience, None
        settings, ttl = self._settings, self._settings.options.ttl
        common: dict[str, Any] = {
            "grace": patience,
            # With time for more tries before the lease is over.
            "patience": min(STORE_ANSWER, max(1.0, ttl / 2)),
            "on_state": self._passed(self._on_state),
            "on_notice": self._passed(self._on_notice),
            "clock": clock,
        }
        if settings.blob is not None:
            from phalanx.store.embedded.blob_client import BlobClient

            self.client = BlobClient(settings.blob, backoff=settings.cas_backoff, **common)
        elif settings.store == "etcd":
            from phalanx.store.etcd.client import etcd_client_from

            self.client = etcd_client_from(settings.endpoint, settings.params.config, **common)
        else:
            from phalanx.store.embedded.client import Client

            host, port = address or (settings.host, settings.port)
            self.client = Client(host, port, token=token, tls=settings.tls, **common)
        try:
            self.client.connect(0)
        except StoreError:
            pass  # not connected yet, or refused already: `on_state` reports either

    def _passed(self, take: Callable[[Any], None]) -> Callable[[Any], None]:
        number = self._number

        def put(what: Any) -> None:
            self._post(lambda: take(what) if number == self._number else None)

        return put

    def hang_up(self) -> None:
        """End the connection; nothing of it arrives any more."""
        client, self.client = self.client, None
        self._number += 1
        if client is not None:
            client.close()

    def send(self, command: Command, answered: Callable[[Reply], None] = lambda reply: None) -> None:
        """Send a command, across reconnects."""
        if self.client is None:
            return
        try:
            self.operations += 1
            self.client.send(command, self._passed(answered))
        except StoreError:
            pass  # the connection has ended for good, and `lost` is in the queue

    def reached(self) -> None:
        self._refused_since = None

    def refused(self, at: float) -> bool:
        """Its address refuses connections; whether that has lasted too long for a store without a journal."""
        welcome = self.client.welcome if self.client is not None else None
        if welcome is None or welcome.durable:
            return False
        self._refused_since = self._refused_since or at
        # Node 0 of a static job is gone with its workers: waiting for it would only delay the restart.
        fixed, grace = self._settings.fixed, self._settings.options.store_grace
        return at - self._refused_since >= (0.0 if fixed else min(REFUSED, grace))

    @property
    def hung_at(self) -> float | None:
        """When a plug-in's call that does not return is given up; every other failure the client reports."""
        return self.dialling_until + _HUNG_CALL if self._settings.blob is not None else None
