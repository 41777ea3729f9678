"""The port for connections between agents: strangers neither hold it nor fill the log."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from phalanx.errors import StoreAuthError
from phalanx.store.net import connections, door, wire
from phalanx.store.net.door import Door
from phalanx.store.net.peer_handshake import Proven, prove_as_client, read_exactly
from phalanx.store.net.token import Token
from tests.conftest import HUNG, wait_until

TOKEN = Token(b"one token of thirty-two bytes or more", "the test")
OTHER = Token(b"another token of thirty-two bytes too", "the test")


class Service:
    """A door that answers with one byte, and what was reported of it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.served = 0
        self.door = Door("127.0.0.1", TOKEN, self._serve, report=self.said.append)

    def _serve(self, proven: Proven) -> None:
        self.served += 1
        proven.sock.sendall(b"!")

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.door.port), timeout=HUNG)

    def visit(self, token: Token = TOKEN) -> None:
        with closing(self.dial()) as sock:
            prove_as_client(sock, token, "here")
            assert read_exactly(sock, 1) == b"!"


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.door.close()
    made.door.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("phalanx-peer")]


def test_strangers_that_drip_bytes_do_not_keep_a_node_out(service: Service) -> None:
    greeting = wire.greeting(os.urandom(wire.NONCE))
    strangers = [service.dial() for _ in range(door.STRANGERS + 20)]
    try:
        for byte in greeting[:-1]:
            service.visit()
            for sock in strangers:
                try:
                    sock.send(bytes([byte]))
                except OSError:
                    pass  # made room
    finally:
        for sock in strangers:
            sock.close()
    assert service.served == len(greeting) - 1


def test_the_time_is_for_the_whole_handshake(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_TIME", 0.5)
    parts = iter(wire.greeting(os.urandom(wire.NONCE)) + bytes(wire.PROOF))
    with closing(service.dial()) as sock:
        read_exactly(sock, wire.GREETING)
        sock.settimeout(0.1)
        closed = False
        while not closed:
            try:
                sock.sendall(bytes([next(parts)]))  # what is awaited, in time for a limit on each byte
                closed = not sock.recv(100)
            except TimeoutError:
                pass
            except ConnectionError:
                closed = True
    service.visit()


def test_strangers_do_not_fill_the_log(service: Service) -> None:
    for number in range(300):
        with closing(service.dial()) as sock:
            sock.sendall(b"%08d" % number + os.urandom(40))
            try:
                while sock.recv(100):
                    pass
            except ConnectionResetError:
                pass
    with pytest.raises(StoreAuthError):
        service.visit(OTHER)
    wait_until(lambda: service.said, "a line")
    assert len(service.said) <= 20, service.said  # five in ten seconds
    service.visit()


def test_a_lack_of_descriptors_passes(service: Service) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [service.dial() for _ in range(3)]
    more = [socket.socket() for _ in range(8)]
    wait_until(lambda: len(service.door._connections.strangers) == 3, "three strangers")
    used = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used[-1] + 1, limits[1]))
    try:
        holes = []
        while True:
            try:
                holes.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        more[0].connect(("127.0.0.1", service.door.port))  # not accepted, for lack of a descriptor
        wait_until(lambda: any("cannot be accepted" in line for line in service.said), "the report")
        for fd in holes:
            os.close(fd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    service.visit()
    for sock in (*waiting, *more):
        sock.close()
