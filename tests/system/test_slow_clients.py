"""Clients that are slow, silent, greedy or many: the others are served as if they were not there."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from phalanx.core.rounds.store_commands import Get, Put, Watch
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net import wire
from tests.conftest import HUNG
from tests.system.test_store_server import TOKEN, closes, shake_hands


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(token=TOKEN) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(*server.address, token=TOKEN) as connected:
        yield connected


def test_a_request_that_comes_byte_by_byte_is_answered_and_holds_up_nobody(
    server: Server, client: Client
) -> None:
    with shake_hands(server.address) as slow:
        slow.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello, put = wire.encode(0, 0, wire.Hello("slow")), wire.encode(1, 1, Put("slow", b"but here"))
        words = slow.seal.sealed(hello) + slow.seal.sealed(put)
        for number, byte in enumerate(words):
            slow.sock.sendall(bytes([byte]))
            assert client.put("k", b"%d" % number).ok  # between any two bytes
        frames: list[wire.Frame] = []
        while len(frames) < 2:
            frames += slow.frames.feed(slow.sock.recv(65536))
    entry = client.get("slow")
    assert entry is not None
    assert entry.value == b"but here"


def test_half_a_message_of_megabytes_costs_what_has_arrived(server: Server, client: Client) -> None:
    with shake_hands(server.address) as slow:
        slow.send(wire.encode(0, 0, wire.Hello("slow")))
        slow.sock.sendall((60 << 20).to_bytes(4, "big") + bytes(1000))
        assert client.put("k", b"v").ok
    assert client.put("k", b"w").ok


def test_strangers_who_say_nothing_are_sent_away(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.store.net.connections.HANDSHAKE_TIME", 0.3)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(server.address)) for _ in range(50)]
        assert client.put("k", b"v").ok
        for sock in silent:
            sock.settimeout(HUNG)
            assert closes(sock)


def test_more_strangers_than_are_let_in_do_not_lock_out_those_inside(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.store.net.connections.STRANGERS", 5)
    monkeypatch.setattr("phalanx.store.net.connections.HANDSHAKE_TIME", 0.3)
    with ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(server.address)) for _ in range(20)]
        assert client.put("k", b"v").ok
        # A newcomer with the token waits its turn: the strangers' time runs out.
        with Client(*server.address, token=TOKEN) as late:
            assert late.put("k", b"w").ok
        for sock in crowd:
            sock.settimeout(HUNG)
            assert closes(sock)


def test_a_watcher_that_does_not_read_does_not_hold_up_the_other_watchers(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.store.net.connections.UNREAD_CAP", 4 << 20)
    dropped = threading.Event()
    server.on_incident = lambda text: dropped.set() if "did not read" in text else None
    seen: queue.Queue[int] = queue.Queue()
    with shake_hands(server.address) as deaf, Client(*server.address, token=TOKEN) as watcher:
        deaf.send(wire.encode(0, 0, wire.Hello("deaf")), wire.encode(1, 1, Watch(1, "k")))
        watcher.watch("k", lambda notice: [seen.put(len(c.entry.value)) for c in notice.changes])
        for size in range(1, 31):
            client.put("k", bytes((1 << 20) + size))
        assert [seen.get(timeout=HUNG) for _ in range(30)] == [(1 << 20) + size for size in range(1, 31)]
        assert dropped.wait(HUNG)


def test_a_flood_of_requests_is_served_in_turns(server: Server, client: Client) -> None:
    """One client asks ten thousand things at once; another's single question is not behind all of them."""
    client.put("k", bytes(1000))
    answered = threading.Semaphore(0)
    with Client(*server.address, token=TOKEN) as greedy:
        for _ in range(10_000):
            greedy.send(Get("k"), lambda reply: answered.release())
        assert client.request(Get("k"), HUNG).ok
        for _ in range(10_000):
            assert answered.acquire(timeout=HUNG)
