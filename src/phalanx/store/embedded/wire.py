"""Frames on a connection to the store, and the proof of the token before the first of them.

A connection opens with a handshake of fixed size, both ways at once, nothing of which is parsed:

    each side sends     MAGIC (8 bytes) + its nonce (32 bytes)
    the client then     HMAC-SHA256(token, "client" + server's nonce + client's nonce)
    the server then     HMAC-SHA256(token, "server" + client's nonce + server's nonce)

The client proves itself first, so a stranger learns nothing it could try passwords against offline
except by being a server that a client connects to; and each side checks before it reads any frame. The
proof binds the opening, not every byte after it: on networks where others can write into a TCP
stream, TLS goes around the whole conversation.

After that: frames, a length (4 bytes, big-endian) and that many bytes of msgpack. The length is
checked against the cap before anything is allocated. A frame is an array `[kind, number, …]`; its
kind names the one tuple type that its body must match. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, NamedTuple

import msgspec

from phalanx.core.store_commands import (
    Add,
    Command,
    Compact,
    Delete,
    Get,
    Grant,
    KeepAlive,
    Notice,
    Put,
    Reply,
    Revoke,
    Txn,
    Unwatch,
    Watch,
)
from phalanx.errors import StoreError

MAGIC = b"PHALANX1"
NONCE = 32
GREETING = len(MAGIC) + NONCE
PROOF = 32
REFUSED = bytes(PROOF)  # in place of the server's proof: the client's token is a different one
OPEN = b"\xff" * PROOF  # in place of the server's proof: the client has a token and the server has none
HEADER = 4
CAP = 64 << 20  # of a frame: a value that large is a mistake, not data for a rendezvous
HELLO_CAP = 4096


class Hello(NamedTuple):
    """The client's first frame: which session this connection belongs to."""

    session: str


class Welcome(NamedTuple):
    """The server's first frame: which store this is, and what it promises."""

    store: str
    durable: bool
    linger: float


class Frame(NamedTuple):
    """A decoded frame; `number` and `done` belong to requests and replies."""

    number: int
    done: int
    body: Command | Reply | Notice | Hello | Welcome


_KINDS: tuple[type[Any], ...] = (
    Hello, Welcome, Reply, Notice,
    Put, Delete, Get, Txn, Add, Grant, KeepAlive, Revoke, Watch, Unwatch, Compact,
)  # fmt: skip
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}
_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[int, int, int, msgspec.Raw])
_decoders = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]


class WireError(StoreError):
    """The other side does not speak this protocol; the connection is of no use any more."""


def encode(number: int, done: int, body: Command | Reply | Notice | Hello | Welcome) -> bytes:
    """A whole frame, length and all."""
    try:
        packed = _encoder.encode((_NUMBER_OF[type(body)], number, done, body))
    except (OverflowError, UnicodeEncodeError) as error:
        raise StoreError(f"{type(body).__name__} cannot be sent: {error}") from None
    if len(packed) > CAP:
        raise StoreError(f"a message of {len(packed)} bytes is over the store's limit of {CAP}")
    return len(packed).to_bytes(HEADER, "big") + packed


def decode(packed: bytes | bytearray | memoryview) -> Frame:
    """The frame in these bytes (without the length), or WireError."""
    try:
        kind, number, done, raw = _envelope.decode(packed)
        if not 0 <= kind < len(_decoders):
            raise WireError(f"a frame of the unknown kind {kind}")
        return Frame(number, done, _decoders[kind].decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame that makes no sense: {error}") from None


class Frames:
    """Cuts a stream of bytes into frames; holds at most one frame and one read."""

    def __init__(self, cap: int = CAP) -> None:
        self.cap = cap
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that these bytes complete; WireError on the first bad one."""
        buffer = self._buffer
        buffer += data
        frames, start = [], 0
        while len(buffer) - start >= HEADER:
            size = int.from_bytes(buffer[start : start + HEADER], "big")
            if size > self.cap:
                raise WireError(f"a frame of {size} bytes, over the limit of {self.cap}")
            if len(buffer) - start - HEADER < size:
                break
            begin = start + HEADER
            frames.append(decode(bytes(buffer[begin : begin + size])))
            start = begin + size
        if start:
            del buffer[:start]
        return frames


def greeting(nonce: bytes) -> bytes:
    """The first bytes that each side sends."""
    return MAGIC + nonce


def read_greeting(data: bytes) -> bytes:
    """The other side's nonce."""
    if not data.startswith(MAGIC):
        raise WireError(f"the other side does not speak Phalanx's protocol (it began with {data[:8]!r})")
    return data[len(MAGIC) :]


def proof(secret: bytes, role: str, challenge: bytes, own: bytes) -> bytes:
    """What `role` sends to show that it has the token, over both nonces."""
    return hmac.new(secret, role.encode() + challenge + own, hashlib.sha256).digest()


def proves(given: bytes, secret: bytes, role: str, challenge: bytes, own: bytes) -> bool:
    """Whether the other side has shown it, compared in constant time."""
    return hmac.compare_digest(given, proof(secret, role, challenge, own))
