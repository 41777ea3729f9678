"""What node 0 of a static rendezvous serves: the store at MASTER_ADDR:MASTER_PORT, emptied per round."""

from __future__ import annotations

import errno
import json
import socket

from phalanx.errors import RendezvousConnectionError, StoreConnectionError, StoreError
from phalanx.membership.address import listening_address
from phalanx.store.torch.server import TorchStoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PREFIX = "phalanx/"


class StaticHost:
    """The server, and what it says about the job."""

    def __init__(self, host: str, port: int, run_id: str, nodes: int) -> None:
        self._run_id = run_id
        self._nodes = nodes
        self._server = _serve(host, port)
        try:
            self._server.start()
            self._publish(0)
        except BaseException:
            self._server.close()
            raise

    @property
    def port(self) -> int:
        """Where it is served."""
        return self._server.port

    @property
    def local_address(self) -> str:
        """How this very machine reaches it."""
        address = self._server.address[0]
        return {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address, address)

    def begin(self, number: int, formed: dict[str, Any]) -> None:
        """A new round: an empty store, with the announcement in it."""
        self._server.reset()
        # First the round, then that it is the one at hand: who reads `now` finds the other there.
        self._server.set(f"{_PREFIX}formed/{number}", json.dumps(formed).encode())
        self._publish(number)

    def worker_port(self, shared: bool) -> int:
        """The port for MASTER_PORT: this one; or one for rank 0 to bind, where workers bring their own."""
        if shared:
            return self.port
        from phalanx.membership.address import free_port

        return free_port()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def _publish(self, number: int) -> None:
        now = {"round": number, "run_id": self._run_id, "nodes": self._nodes}
        self._server.set(f"{_PREFIX}now", json.dumps(now).encode())


def _serve(host: str, port: int) -> TorchStoreServer:
    """A server at the named address only; at all of them where the name is not known here, or is a loopback.

    A Kubernetes service or a NAT gateway has an address that only others can use. But the same is seen when
    a second node was started as node 0, so somebody who answers there already is reported instead.
    """
    try:
        return TorchStoreServer(listening_address(host), port)
    except StoreConnectionError as error:
        cause = error.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        if number != errno.EADDRNOTAVAIL:
            taken = " (taken by another job, or by a second node with --node-rank 0?)"
            hint = taken if number == errno.EADDRINUSE else ""
            raise RendezvousConnectionError(f"node 0 cannot serve {host}:{port}{hint}: {error}") from error
    _refuse_a_second(host, port)
    try:
        return TorchStoreServer("", port)
    except StoreError as error:
        raise RendezvousConnectionError(f"node 0 cannot serve {host}:{port}: {error}") from error


def _refuse_a_second(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), 2.0).close()
    except OSError:
        return
    raise RendezvousConnectionError(
        f"{host}:{port} is served by another machine already, and this node was started as node 0 too: "
        "give every node its own --node-rank"
    )
