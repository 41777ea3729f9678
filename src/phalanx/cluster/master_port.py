"""MASTER_PORT on node 0 of a static job: the agents' store and the workers' torch store on one socket.

torch's clients begin with the opcode VALIDATE, agents with `wire.MAGIC` or a TLS record, so the first byte of
a connection selects the server. A connection that sends nothing waits in the torch server's selector and
holds up nothing. Each round begins with an empty torch store; the agents' store lives as long as node 0's
agent.
"""

from __future__ import annotations

import errno
import json
import socket

from phalanx.errors import RendezvousConnectionError, StoreConnectionError, StoreError
from phalanx.job.address import free_port, listening_address
from phalanx.store.embedded.server import Server
from phalanx.store.net import wire
from phalanx.store.tcpstore.server import TorchStoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.cluster.settings import Settings
    from phalanx.store.net.token import Token

JOB = "static/job"  # the key with the job that meets here
_FIRST_BYTES = wire.MAGIC[:1] + b"\x16"  # 0x16: a TLS record with a handshake message


class MasterPort:
    """The socket and both servers behind it."""

    def __init__(
        self,
        settings: Settings,
        token: Token | None,
        on_failure: Callable[[str], None],
        on_refused: Callable[[str, str], None],
        on_torch: Callable[[str], None],
    ) -> None:
        """`on_torch`: for hosts that speak torch's protocol before there is any worker."""
        self._on_torch = on_torch
        self._rounds = 0
        self._agents = Server(
            None,
            token=token,
            linger=settings.linger,
            tls=settings.tls,
            seed={JOB: job_record(settings.run_id, settings.options.max_nodes)},
            on_failure=on_failure,
            on_refused=on_refused,
        )
        try:
            self._torch = self._serve(settings.host, settings.port, settings.name_known)
        except BaseException:
            self._agents.close()
            raise

    def start(self) -> None:
        """Begin to serve."""
        self._agents.start()
        self._torch.start()

    @property
    def address(self) -> tuple[str, int]:
        """How this machine reaches it."""
        host, port = self._torch.address
        return {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host), port

    def new_round(self, shared: bool) -> int:
        """Empty the workers' store; the port for MASTER_PORT: this one, or a free one for rank 0 to bind."""
        self._rounds += 1
        self._torch.reset()
        return self._torch.port if shared else free_port()

    def close(self) -> None:
        """Stop serving."""
        self._torch.close()
        self._agents.close()

    def _serve(self, host: str, port: int, name_known: bool) -> TorchStoreServer:
        """A server at the named address only, or at all addresses where this machine does not have it.

        A Kubernetes service or a NAT gateway has an address that only other machines can use. A second node
        that was started as node 0 looks the same, so an address that already answers is an error. The name of
        a pod may have no address yet: then it is not asked for.
        """
        try:
            return self._bound(listening_address(host) if name_known else "", port)
        except StoreConnectionError as error:
            cause = error.__cause__
            number = cause.errno if isinstance(cause, OSError) else None
            if number != errno.EADDRNOTAVAIL:
                taken = " (taken by another job, or by a second node with --node-rank 0?)"
                hint = taken if number == errno.EADDRINUSE else ""
                raise RendezvousConnectionError(
                    f"node 0 cannot serve {host}:{port}{hint}: {error}"
                ) from error
        _refuse_a_second(host, port)
        try:
            return self._bound("", port)
        except StoreError as error:
            raise RendezvousConnectionError(f"node 0 cannot serve {host}:{port}: {error}") from error

    def _bound(self, host: str, port: int) -> TorchStoreServer:
        return TorchStoreServer(
            host, port, adopt=self._agents.adopt, foreign=_FIRST_BYTES, on_client=self._client
        )

    def _client(self, host: str) -> None:
        if not self._rounds:
            self._on_torch(host)


def job_record(run_id: str, nodes: int) -> bytes:
    """The value of `JOB`."""
    return json.dumps({"run_id": run_id, "nodes": nodes}).encode()


def mismatch(value: bytes, settings: Settings) -> str:
    """Why a node with these settings does not belong to the job with this record; empty if it does."""
    from phalanx.core.rounds.records import printable

    try:
        found = json.loads(value)
        run_id, nodes = str(found["run_id"]), int(found["nodes"])
    except (ValueError, TypeError, KeyError):
        return f"{settings.where} is not served by node 0 of a static job: give every job its own port"
    wanted = settings.options.max_nodes
    if (run_id, nodes) == (settings.run_id, wanted):
        return ""
    return (
        f"node {settings.rank} of {wanted} of run {settings.run_id!r} came to {settings.where}, where run "
        f"'{printable(run_id)}' with {nodes} nodes meets: "
        "give every node the same --rdzv-id and --nnodes, and every job its own port"
    )


def _refuse_a_second(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), 2.0).close()
    except OSError:
        return
    raise RendezvousConnectionError(
        f"{host}:{port} is served by another machine already, and this node was started as node 0 too: "
        "give every node its own --node-rank"
    )
