"""Accepts connections of other agents; each that has proved the token is served in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.store.net import wire
from phalanx.store.net.connections import Connections, Peer, set_options
from phalanx.store.net.peer_handshake import Proven, hang_up
from phalanx.store.net.token import Token

if TYPE_CHECKING:
    from phalanx.store.net.tls import Tls

STRANGERS = 64
_PROOF_TIME = 10.0  # for the other side to take this one's proof


class Door:
    """Listens at an address, on a port that the system chooses."""

    def __init__(
        self,
        address: str,
        token: Token,
        serve: Callable[[Proven], None],
        *,
        binding: bytes = b"",
        tls: Tls | None = None,
        report: Callable[[str], None] = lambda text: None,
        name: str = "phalanx-peer",
    ) -> None:
        """`serve` gets each connection that has proved the token. OSError if it cannot listen.

        `binding`: what the proof covers besides the nonces, without TLS."""
        self._serve, self._report, self._name = serve, report, name
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=128)
        try:
            listener.setblocking(False)
            set_options(listener)
            self.port = int(listener.getsockname()[1])
            self._connections = Connections(
                self, token, listener, binding=binding, tls=tls, most=lambda: STRANGERS
            )
        except BaseException:
            listener.close()
            raise
        self._lock = threading.Lock()  # of what is below
        self._open: set[socket.socket] = set()  # those that are served
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and the threads that use them; does not wait."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                hang_up(sock)
        self._connections.wakes.ring()

    def join(self) -> None:
        """Wait until all threads have ended, after `close`."""
        self._thread.join()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._closed:
            now = time.monotonic()
            now, _ = self._connections.wait(self._connections.next_time(now), now)
            self._connections.serve(now)
            self._connections.flush()
        self._connections.close()

    # -- the connections ----------------------------------------------------------------------------

    def on_proven(self, peer: Peer) -> None:
        """Serve it in a thread; what it sends first is for that."""
        self._connections.release(peer)
        proven = Proven(peer.sock, peer.seal, peer.frames.seal)
        thread = threading.Thread(
            target=self._answer, args=(proven, bytes(peer.out)), name=self._name, daemon=True
        )
        with self._lock:
            self._open.add(peer.sock)
            if self._closed:
                hang_up(peer.sock)
        try:
            thread.start()
            self._threads = [known for known in self._threads if known.is_alive()] + [thread]
        except RuntimeError as error:  # the limit of the system or the control group
            self._gone(peer.sock)
            self._connections.complain(f"connections of other nodes cannot be served: {error}")

    def on_data(self, peer: Peer, data: bytes, now: float) -> None:
        """Nobody speaks here before its thread reads."""

    def on_gone(self, peer: Peer, hung_up: bool) -> None:
        """A stranger has gone."""

    def on_incident(self, text: str) -> None:
        if not self._closed:
            self._report(text)

    def on_refused(self, host: str, why: str) -> None:
        """It is reported already."""

    def _answer(self, proven: Proven, proof: bytes) -> None:
        """In the thread of a connection."""
        try:
            try:
                proven.sock.settimeout(_PROOF_TIME)
                proven.sock.sendall(proof)
            except (OSError, wire.WireError):
                return  # it has gone
            self._serve(proven)
        finally:
            self._gone(proven.sock)

    def _gone(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        sock.close()
