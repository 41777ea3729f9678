"""Accepts the connections of other agents and proves the token on them; each is then served in a thread.

Invariants
- Nothing is read from a stranger but its half of the handshake, for which it has HANDSHAKE seconds in all,
  however it spreads the bytes.
- A crowd of strangers keeps no node out: one of them makes room for the next (strangers.py). They cannot fill
  the log either.
- A process that is out of descriptors accepts again when it has some.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.errors import StoreAuthError
from phalanx.store.net import wire
from phalanx.store.net.peer_handshake import Proven, hang_up, prove_as_server
from phalanx.store.net.strangers import Complaints, Strangers
from phalanx.store.net.token import Token

if TYPE_CHECKING:
    import ssl

    from phalanx.store.net.tls import Tls

HANDSHAKE = 10.0
STRANGERS = 64
_PAUSE = 0.2  # seconds without accepting, when there are no descriptors
_ERRORS = (OSError, wire.WireError, StoreAuthError)


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
        self._token, self._serve, self._binding, self._name = token, serve, binding, name
        self._sealing: ssl.SSLContext | None = None
        if tls is not None:
            from phalanx.store.net.tls import own_fingerprint, server_context

            self._sealing, self._binding = server_context(tls), own_fingerprint(tls)
        self._complaints = Complaints(report)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()  # of what is below
        self._strangers: Strangers[socket.socket] = Strangers()
        self._deadlines: dict[socket.socket, float] = {}  # of strangers
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []  # of connections
        self._closed = False
        self._wake_in, self._wake_out = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"{name}-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and the threads that use them; does not wait."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                hang_up(sock)
        os.close(self._wake_out)

    def join(self) -> None:
        """Wait until all threads have ended, after `close`."""
        self._thread.join()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        resume = 0.0  # when connections are accepted again
        while not self._closed:
            now = time.monotonic()
            poll = select.poll()
            poll.register(self._wake_in, select.POLLIN)
            if now >= resume:
                poll.register(self._listener, select.POLLIN)
            with self._lock:
                times = [*self._deadlines.values(), *([resume] if resume > now else [])]
            poll.poll(max(0.0, min(times) - now) * 1000 + 1 if times else None)
            now = time.monotonic()
            self._end_late(now)
            if now >= resume and not self._accept(now):
                resume = now + _PAUSE
        self._listener.close()
        os.close(self._wake_in)

    def _accept(self, now: float) -> bool:
        """Take the next connection, if there is one; False: there is no descriptor for it."""
        try:
            sock, where = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return True
        except OSError as error:
            with self._lock:
                if self._strangers:
                    self._evict(self._strangers.next_to_go())
            self._complaints.say(f"connections of other nodes cannot be accepted: {error}", now)
            return False
        try:
            sock.settimeout(HANDSHAKE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._sealing is not None:
                sock = self._sealing.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:
            sock.close()  # it has gone again already
            return True
        host = str(where[0])
        thread = threading.Thread(target=self._answer, args=(sock, host), name=self._name, daemon=True)
        with self._lock:
            while len(self._strangers) >= STRANGERS:
                self._evict(self._strangers.next_to_go())
            self._strangers.add(sock, host)
            self._deadlines[sock] = now + HANDSHAKE
            self._open.add(sock)
            if self._closed:
                hang_up(sock)
        try:
            thread.start()
            self._threads = [known for known in self._threads if known.is_alive()] + [thread]
        except RuntimeError as error:  # the limit of the system or the control group
            self._gone(sock)
            self._complaints.say(f"connections of other nodes cannot be served: {error}", now)
            return False
        return True

    def _end_late(self, now: float) -> None:
        with self._lock:
            for sock in [one for one, at in self._deadlines.items() if at <= now]:
                self._evict(sock)

    def _evict(self, sock: socket.socket) -> None:
        self._strangers.discard(sock)
        del self._deadlines[sock]
        hang_up(sock)

    # -- the thread of a connection -----------------------------------------------------------------

    def _answer(self, sock: socket.socket, host: str) -> None:
        try:
            try:
                if self._sealing is not None:
                    sock.do_handshake()  # type: ignore[attr-defined] # wrapped
                proven = prove_as_server(
                    sock, self._token, self._binding, is_sealed=self._sealing is not None
                )
            except _ERRORS as error:
                if not self._closed:
                    self._complaints.say(f"a connection from {host} was refused: {error}", time.monotonic())
                return
            with self._lock:
                if sock not in self._strangers:
                    return  # too late
                self._strangers.discard(sock)
                del self._deadlines[sock]
            self._serve(proven)
        finally:
            self._gone(sock)

    def _gone(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.discard(sock)
            self._deadlines.pop(sock, None)
            self._open.discard(sock)
        sock.close()
