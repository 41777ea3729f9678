"""The workers' store (torch's protocol) at MASTER_ADDR:MASTER_PORT, served by the agent of node 0.

It is bound before the first worker starts, so that the port is never chosen and released, and emptied for
every round.
"""

from __future__ import annotations

import _socket as socket  # not socket itself: every start waits for this

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class WorkerStore:
    """Bound on construction, served once the workers are being started."""

    def __init__(self, host: str | None, port: int | None, served: bool, *, only_there: bool = True) -> None:
        """With `only_there`, at that host; else at all addresses if this machine does not have it.

        A Kubernetes service or a NAT gateway has an address that only other machines can use.
        """
        self.host = host or "localhost"
        self.serving = served
        self.closed = False
        self._server: Any = None
        self._socket: socket.socket | None = None
        if not served:
            from phalanx.job.address import free_port

            # Rank 0 binds it itself, as the user asked; nothing can hold the port for it meanwhile.
            self.port = port or free_port()
            return
        try:
            self._socket = _bound(self.host, port or 0)
        except OSError as error:
            import errno

            # The host has no address, or not one of this machine.
            elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            if only_there or not elsewhere:
                text = f"{self.host}:{port}: cannot serve the workers' store there ({error.strerror})"
                raise OSError(error.errno, text) from None
            from phalanx.job.address import bound_everywhere

            self._socket = bound_everywhere(port or 0)
        self._socket.listen(1024)
        self.port = int(self._socket.getsockname()[1])

    @property
    def operations(self) -> int:
        """Requests answered in this round."""
        return 0 if self._server is None else int(self._server.operations)

    def new_round(self) -> None:
        """Every round begins with an empty store."""
        if self._server is not None:
            self._server.reset()

    def end_round(self) -> None:
        """Drop the connections of workers that are recalled: one that waits for a key is freed by it."""
        self.new_round()

    def serve(self) -> None:
        """Answer; connections made since the bind wait in the backlog."""
        if self._server is None and self._socket is not None:
            from socket import socket as full_socket

            from phalanx.store.tcpstore.server import TorchStoreServer

            self._server = TorchStoreServer(sock=full_socket(fileno=self._socket.detach()))
            self._socket = None
            self._server.start()

    def close(self) -> None:
        self.closed = True
        if self._server is not None:
            self._server.close()
        if self._socket is not None:
            self._socket.close()


def _bound(host: str, port: int) -> socket.socket:
    # As bytes: a str would be taken through the codec for international names, which has to be loaded.
    name = host.encode() if host.isascii() else host
    family, kind, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
