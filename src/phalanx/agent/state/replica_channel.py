"""A connection between two agents that carries kept state: both prove the token, every frame has a tag.

The handshake and the tags are those of the store (store/net/wire.py), with TLS where it is set: a frame
that was injected or changed ends the connection, so that what a worker unpickles later is what a worker of
this job had pickled. A frame is a length, a kind of one byte, the data, and the tag. Its length is checked
before anything is allocated.

Used by one thread: calls block, with a time limit on silence. `stop` may come from any thread.
"""

from __future__ import annotations

import socket

from phalanx.errors import StoreAuthError
from phalanx.store.net import peer_handshake, wire
from phalanx.store.net.peer_handshake import Proven, hang_up, read_exactly
from phalanx.store.net.token import Token

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.store.net.tls import Tls

PART = 1 << 20  # bytes of data in one frame
_CAP = PART + 4096
_SILENCE = 30.0
_HANDSHAKE = 10.0
_PACE = 1 << 30  # bytes per second of one connection, kept by the kernel: the job's own traffic goes first
_SO_MAX_PACING_RATE = 47

ERRORS = (OSError, wire.WireError, StoreAuthError, ValueError)


class ReplicaChannel:
    """One end of a connection that has passed the handshake."""

    def __init__(self, proven: Proven) -> None:
        self._sock, self._outgoing, self._incoming = proven
        sock = self._sock
        sock.settimeout(_SILENCE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _PACE)
        except OSError:
            pass

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send one frame."""
        framed = (len(data) + 1).to_bytes(wire.HEADER, "big") + kind + data
        self._sock.sendall(self._outgoing.sealed(framed))

    def receive(self, patient: bool = False) -> tuple[bytes, bytes]:
        """The next frame: its kind and its data. `patient`: it may take any time to come."""
        self._sock.settimeout(None if patient else _SILENCE)
        head = read_exactly(self._sock, wire.HEADER)
        self._sock.settimeout(_SILENCE)
        size = int.from_bytes(head, "big")
        if not 0 < size <= _CAP:
            raise wire.WireError(f"a frame of {size} bytes, over the limit of {_CAP}")
        body = read_exactly(self._sock, size)
        if self._incoming is not None:
            self._incoming.check(head + body, read_exactly(self._sock, wire.TAG))
        return body[:1], body[1:]

    def stop(self) -> None:
        """End the calls of the thread that uses it, from another one."""
        hang_up(self._sock)

    def close(self) -> None:
        """Close it; only in the thread that uses it."""
        self.stop()
        self._sock.close()


def dial(address: tuple[str, int], token: Token, tls: Tls | None) -> ReplicaChannel:
    """Connect to another agent; OSError, WireError or StoreAuthError."""
    return ReplicaChannel(peer_handshake.dial(address, token, _HANDSHAKE, tls=tls))
