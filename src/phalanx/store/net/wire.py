"""Frames on a connection to the store, and the proof of the token before the first of them.

A connection opens with a handshake of fixed size, both ways at once, nothing of which is parsed:

    each side sends     MAGIC (8 bytes) + its nonce (32 bytes)
    the client then     HMAC-SHA256(key, "client" + server's nonce + client's nonce)
    the server then     HMAC-SHA256(key, "server" + client's nonce + server's nonce)

The key is made from the token (token.py). The client proves itself first, so a stranger learns nothing
to try passwords against offline except by being a server that a client connects to; and each side checks
before it reads any frame.

After that: frames, a length (4 bytes, big-endian), that many bytes of msgpack, and a tag (16 bytes): keyed
BLAKE2b over length and bytes, with a key of this connection and direction and the number of the frame. A
frame that was injected, changed, repeated or left out ends the connection. Under TLS there are no tags: TLS
protects every byte, and the proof covers the server's certificate. The length is checked against the cap
before anything is allocated. A frame is an array `[kind, number, …]`; its kind names the one tuple type that
its body must match. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, NamedTuple

import msgspec

from phalanx.core.rounds.store_commands import (
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

MAGIC = b"PHALANX3"
NONCE = 32
GREETING = len(MAGIC) + NONCE
PROOF = 32
REFUSED = bytes(PROOF)  # in place of the server's proof: the client's token is a different one
OPEN = b"\xff" * PROOF  # in place of the server's proof: the client has a token and the server has none
HEADER = 4
TAG = 16
CAP = 64 << 20  # of a frame: a value that large is a mistake, not data for a rendezvous
HELLO_CAP = 4096
_TORCH = b"\x00\xce\xf7\x85\x3c"  # how a client of torch's TCPStore begins (store/tcpstore/protocol.py)


class Hello(NamedTuple):
    """The client's first frame: which session this connection belongs to, and what it has seen so far."""

    session: str
    store: str = ""
    incarnation: str = ""  # the run of the server that the client was last connected to,
    revision: int = 0  # and the highest revision that it saw there


class Welcome(NamedTuple):
    """The server's first frame: which store this is, and what it promises.

    `store` names the data. `epoch` grows when the store has lost changes that it had already answered (an
    old or damaged journal): what a client knows from an earlier epoch may never have happened.
    """

    store: str
    durable: bool
    linger: float
    epoch: int = 1
    revision: int = 0
    incarnation: str = ""  # this run of the server


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


class SpeaksTorch(WireError):
    """The other side speaks the protocol of torch's TCPStore."""

    def __init__(self, who: str) -> None:
        super().__init__(
            f"{who} speaks the protocol of torch's store: does that node run torchrun? "
            "Start every node with phalanx run"
        )


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


class Seal:
    """The tags of one direction of a connection, in the order of its frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def tag(self, framed: bytes | bytearray) -> bytes:
        """The tag of the next frame, which is given with its length."""
        self._count += 1
        number = self._count.to_bytes(16, "big")
        return hashlib.blake2b(framed, digest_size=TAG, key=self._key, salt=number).digest()

    def sealed(self, framed: bytes) -> bytes:
        """The next frame with its tag."""
        return framed + self.tag(framed)

    def check(self, framed: bytes | bytearray, tag: bytes | bytearray) -> None:
        """Raise WireError unless this is the next frame of the other side."""
        if not hmac.compare_digest(self.tag(framed), tag):
            raise WireError("a frame that the other side did not send: its tag is wrong")


class NoSeal(Seal):
    """For connections that TLS protects."""

    def __init__(self) -> None:
        super().__init__(b"")

    def sealed(self, framed: bytes) -> bytes:
        return framed


def seals(key: bytes, client_nonce: bytes, server_nonce: bytes) -> tuple[Seal, Seal]:
    """For the client's frames, and for the server's."""
    both = client_nonce + server_nonce
    first, second = (
        hmac.new(key, f"frames of the {role}".encode() + both, hashlib.sha256).digest()
        for role in ("client", "server")
    )
    return Seal(first), Seal(second)


class Frames:
    """Cuts a stream of bytes into frames; holds at most one frame and one read."""

    def __init__(self, cap: int = CAP, seal: Seal | None = None) -> None:
        self.cap = cap
        self.seal = seal  # None: the frames have no tags
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
            begin = start + HEADER
            end = begin + size
            after = end if self.seal is None else end + TAG
            if len(buffer) < after:
                break
            if self.seal is not None:
                self.seal.check(buffer[start:end], buffer[end:after])
            frames.append(decode(bytes(buffer[begin:end])))
            start = after
        if start:
            del buffer[:start]
        return frames


def greeting(nonce: bytes) -> bytes:
    """The first bytes that each side sends."""
    return MAGIC + nonce


def read_greeting(data: bytes) -> bytes:
    """The other side's nonce."""
    if not data.startswith(MAGIC):
        if data.startswith(MAGIC[:-1]):
            raise WireError(
                f"the other side is another version of Phalanx (its protocol is {data[:8]!r}, ours is "
                f"{MAGIC!r}): install the same version on all nodes"
            )
        if data.startswith(_TORCH):
            raise SpeaksTorch("it")
        raise WireError(f"the other side does not speak Phalanx's protocol (it began with {data[:8]!r})")
    return data[len(MAGIC) :]


def proof(key: bytes, role: str, challenge: bytes, own: bytes) -> bytes:
    """What `role` sends to show that it has the token, over both nonces."""
    return hmac.new(key, role.encode() + challenge + own, hashlib.sha256).digest()


def proves(given: bytes, key: bytes, role: str, challenge: bytes, own: bytes) -> bool:
    """Whether the other side has shown it, compared in constant time."""
    return hmac.compare_digest(given, proof(key, role, challenge, own))
