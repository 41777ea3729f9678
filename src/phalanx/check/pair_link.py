"""Latency and bandwidth between two nodes over TCP, on connections that have proved the token.

One node of a pair dials, three times: for the latency, to send, and to receive. The receiving side counts,
and ends a measurement by closing the connection, so that nothing that is still on its way has to be waited
for. The bytes are zeros and mean nothing, so that no tags protect them: what was measured is published
through the store, which does.

A node measures with one partner at a time: whoever accepts a connection lets the other side wait until it is
free. Pairs form a path at most (see core/diagnosis/pairing.py), never a circle, so that no two wait for each
other.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import NamedTuple

from phalanx.errors import PhalanxError
from phalanx.store.net.door import Door
from phalanx.store.net.peer_handshake import Proven, dial, read_exactly
from phalanx.store.net.token import Token

SECONDS = 0.5
"""Of one direction."""
_WINDOW = 0.05
_PINGS, _PING_TIME = 200, 0.5
_BLOCK = 1 << 18
_HANDSHAKE = 3.0
_TURN = 5.0  # until the other node is free
_SILENCE = 2.0
_PURPOSE = b"phalanx check"
_PING, _TO_YOU, _TO_ME = b"P", b"S", b"R"
_GO = b"g"
ERRORS = (OSError, PhalanxError)


class LinkFigures(NamedTuple):
    """What one side of a pair has measured: seconds (None: the other side measures it), bytes per second."""

    latency: float | None
    bandwidth: float | None


class PairLink:
    """This node's end of all its measurements: `measure` with a partner, or be measured by one."""

    def __init__(self, address: str, token: Token) -> None:
        self._token = token
        self._turn = threading.Lock()
        self._news = threading.Condition()
        self._received: dict[tuple[int, int], float] = {}  # round and partner → bytes per second
        self._door = Door(address, token, self._answer, binding=_PURPOSE, name="phalanx-check-pair")
        self.port = self._door.port

    # -- dialing ------------------------------------------------------------------------------------

    def measure(self, number: int, me: int, address: tuple[str, int]) -> LinkFigures:
        """With a node that is at this address, in this round; OSError or PhalanxError."""
        with self._turn:
            with self._dial(address, _PING, number, me) as sock:
                latency = _ping(sock)
            with self._dial(address, _TO_YOU, number, me) as sock:
                _send(sock)
            with self._dial(address, _TO_ME, number, me) as sock:
                return LinkFigures(latency, _receive(sock))

    def _dial(self, address: tuple[str, int], kind: bytes, number: int, me: int) -> socket.socket:
        sock = dial(address, self._token, _HANDSHAKE, purpose=_PURPOSE).sock
        try:
            sock.sendall(kind + number.to_bytes(4, "big") + me.to_bytes(4, "big"))
            sock.settimeout(_TURN)
            if read_exactly(sock, 1) != _GO:
                raise ConnectionResetError(f"{address[0]} does not take part")
            sock.settimeout(_SILENCE)
        except BaseException:
            sock.close()
            raise
        return sock

    # -- being dialed -------------------------------------------------------------------------------

    def received(self, number: int, partner: int, until: float) -> float | None:
        """What came from a partner that has dialed, in bytes per second; None: nothing did."""
        key = number, partner
        with self._news:
            self._news.wait_for(lambda: key in self._received, max(0.0, until - time.monotonic()))
            return self._received.get(key)

    def _answer(self, proven: Proven) -> None:
        sock = proven.sock
        try:
            sock.settimeout(_HANDSHAKE)
            asked = read_exactly(sock, 9)
            kind, key = asked[:1], (int.from_bytes(asked[1:5], "big"), int.from_bytes(asked[5:], "big"))
            if not self._turn.acquire(timeout=_TURN):
                return
            try:
                sock.settimeout(_SILENCE)
                sock.sendall(_GO)
                if kind == _PING:
                    while data := sock.recv(64):
                        sock.sendall(data)
                elif kind == _TO_YOU:
                    rate = _receive(sock)
                    with self._news:
                        self._received[key] = rate
                        self._news.notify_all()
                elif kind == _TO_ME:
                    _send(sock)
            finally:
                self._turn.release()
        except OSError:
            pass  # the end of a measurement

    def close(self) -> None:
        """End everything; threads that wait on a connection end with it."""
        self._door.close()


def _ping(sock: socket.socket) -> float:
    """The lower quartile of round trips of one byte: what the network takes, not what the machines do."""
    taken: list[float] = []
    end = time.monotonic() + _PING_TIME
    while len(taken) < _PINGS and (len(taken) < 3 or time.monotonic() < end):
        began = time.perf_counter()
        sock.sendall(b"x")
        read_exactly(sock, 1)
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 4]


def _send(sock: socket.socket) -> None:
    """Send zeros until the other side has had enough of them."""
    block = bytes(_BLOCK)
    end = time.monotonic() + SECONDS + _SILENCE
    try:
        while time.monotonic() < end:
            sock.sendall(block)
    except (ConnectionResetError, BrokenPipeError):
        return


def _receive(sock: socket.socket) -> float:
    """Bytes per second: the upper quartile of short windows, because a busy machine makes some of them idle.

    The first ones are left out, as buffers on the way absorb them."""
    buffer = bytearray(_BLOCK)
    rates: list[float] = []
    began = at = time.monotonic()
    count = 0
    while at - began < SECONDS:
        got = sock.recv_into(buffer)
        now = time.monotonic()
        if not got:
            break
        count += got
        if now - at >= _WINDOW:
            rates.append(count / (now - at))
            at, count = now, 0
    if not rates:
        raise ConnectionResetError("nothing came")
    rates = sorted(rates[2:] or rates)
    return rates[3 * len(rates) // 4]
