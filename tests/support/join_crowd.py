"""Many nodes in one process: real participants and the store's real protocol, driven by one selector.

    python -m tests.support.join_crowd HOST:PORT COUNT [--within SECONDS]   (the token in PHALANX_TOKEN)

A thousand agents on a small machine measure the machine. Here a node is a `Participant`, a `Session` and a
socket, without threads or workers, so that the store is the bottleneck. The crowd forms one round. It prints
the seconds that took, the seconds until the last Welcome, and how many connections the store closed.
"""

from __future__ import annotations

import argparse
import errno
import heapq
import json
import os
import selectors
import socket
import time
from collections.abc import Callable

from phalanx.cluster.membership import EMBEDDED_BATCH
from phalanx.core.rounds.leader_view import Options
from phalanx.core.rounds.participant import Participant
from phalanx.core.rounds.participant_events import (
    Action,
    Answer,
    ClockTick,
    Connected,
    Event,
    Noticed,
    Send,
    StartRound,
)
from phalanx.core.rounds.records import NodeInfo
from phalanx.core.rounds.requests import CONTROL
from phalanx.core.rounds.store_commands import Command, Notice, Put, Reply
from phalanx.store.embedded.client_session import Request, Session
from phalanx.store.net import wire
from phalanx.store.net.token import Token, find_token

MEETING = "ctl/meeting/1"  # as its node of rank 0 writes it: only then can the others start
_CHUNK = 256 << 10


class Joiner:
    """One node: connects, proves the token, joins."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd = crowd
        name = f"n{number:05}"
        self.participant = Participant(NodeInfo(name, name, "127.0.0.1"), crowd.options)
        self.session_id = os.urandom(12).hex()
        self.session = Session()
        self.tags: dict[int, int] = {}
        self.timer = 0
        self.welcome = False
        self.connect()

    def connect(self) -> None:
        """Begin a connection."""
        self.sock = socket.socket(self.crowd.family)
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.nonce, self.raw, self.stage = os.urandom(wire.NONCE), b"", "greeting"
        self.out = bytearray(wire.greeting(self.nonce))
        self.seal: wire.Seal = wire.NoSeal()
        self.frames = wire.Frames()
        self.events = selectors.EVENT_READ | selectors.EVENT_WRITE
        problem = self.sock.connect_ex(self.crowd.address)
        assert problem in (0, errno.EINPROGRESS), os.strerror(problem)
        self.crowd.selector.register(self.sock, self.events, self)

    def ready(self, mask: int) -> None:
        """The socket can be read or written."""
        try:
            if mask & selectors.EVENT_READ:
                data = self.sock.recv(_CHUNK)
                if not data:
                    raise ConnectionResetError
                self.received(data)
            self.flush()
        except OSError:
            self.crowd.selector.unregister(self.sock)
            self.sock.close()
            self.crowd.dropped += 1
            self.connect()

    def flush(self) -> None:
        """Send what is to be sent, as far as the socket takes it."""
        if self.out:
            try:
                del self.out[: self.sock.send(self.out)]
            except BlockingIOError:
                pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.out else 0)
        if wanted != self.events:
            self.events = wanted
            self.crowd.selector.modify(self.sock, wanted, self)

    def received(self, data: bytes) -> None:
        """Handshake, then frames."""
        if self.stage != "open":
            self.raw += data
            data = b""
        if self.stage == "greeting" and len(self.raw) >= wire.GREETING:
            self.theirs, self.raw = wire.read_greeting(self.raw[: wire.GREETING]), self.raw[wire.GREETING :]
            self.stage = "proof"
            self.out += wire.proof(self.crowd.key, "client", self.theirs, self.nonce)
        if self.stage == "proof" and len(self.raw) >= wire.PROOF:
            given, data = self.raw[: wire.PROOF], self.raw[wire.PROOF :]
            assert wire.proves(given, self.crowd.key, "server", self.nonce, self.theirs)
            self.seal, self.frames.seal = wire.seals(self.crowd.key, self.nonce, self.theirs)
            self.stage = "open"
            self.out += self.seal.sealed(wire.encode(0, 0, wire.Hello(self.session_id)))
        for frame in self.frames.feed(data):
            self.take_in(frame)

    def take_in(self, frame: wire.Frame) -> None:
        """One frame of the store."""
        body = frame.body
        if isinstance(body, wire.Welcome):
            for request in self.session.resume():
                self.transmit(request)
            if self.welcome:
                self.step(Connected())
            else:
                self.welcome = True
                self.crowd.welcomed()
                self.act(self.participant.start(self.crowd.clock()))
        elif isinstance(body, Notice):
            if (notice := self.session.noticed(body)) is not None:
                self.step(Noticed(notice))
                if any(
                    change.entry.key.endswith(MEETING) for change in notice.changes if notice.watch == CONTROL
                ):
                    assert self.participant.work.running == 1
                    self.crowd.started += 1
        elif isinstance(body, Reply):
            requests, result = self.session.answered(frame.number, body)
            for request in requests:
                self.transmit(request)
            if isinstance(result, Notice):
                self.step(Noticed(result))
            elif result is not None and (tag := self.tags.pop(frame.number)):  # 0: the crowd has asked
                self.step(Answer(tag, result))

    def step(self, event: Event) -> None:
        """Pass an event to the participant."""
        self.act(self.participant.step(self.crowd.clock(), event))

    def act(self, actions: list[Action]) -> None:
        """Do what the participant decided."""
        for action in actions:
            if isinstance(action, Send):
                self.ask(action.command, action.tag)
            elif isinstance(action, StartRound) and action.place.rank == 0:
                self.ask(Put(self.crowd.options.prefix + MEETING, b"127.0.0.1 1"), 0)
        self.timer += 1
        if (wake := self.participant.wake_at()) is not None:
            timer = self.timer
            self.crowd.at(wake, lambda: self.tick() if timer == self.timer else None)

    def tick(self) -> None:
        """Time has passed."""
        self.step(ClockTick())
        self.flush()

    def ask(self, command: Command, tag: int) -> None:
        """Send a command; the participant gets its answer under this tag."""
        request = self.session.ask(command)
        self.tags[request.number] = tag
        self.transmit(request)

    def transmit(self, request: Request) -> None:
        """Queue a request."""
        self.crowd.requests += 1
        self.out += self.seal.sealed(wire.encode(*request))


class Crowd:
    """All nodes of a job."""

    def __init__(self, address: tuple[str, int], count: int, token: Token, *, ttl: float = 60.0) -> None:
        self.address, self.count, self.key = address, count, token.key
        self.family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.clock = time.monotonic
        self.options = Options(
            min_nodes=count,
            max_nodes=count,
            ttl=ttl,
            join_timeout=600.0,
            store_grace=600.0,
            prefix="crowd/",
            batch=EMBEDDED_BATCH,
        )
        self.selector = selectors.DefaultSelector()
        self.started = self.dropped = self.requests = self.welcomes = 0
        self.last_welcome = 0.0
        self.joiners: list[Joiner] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Call `what` at a time."""
        self._numbers += 1
        heapq.heappush(self._heap, (when, self._numbers, what))

    def welcomed(self) -> None:
        """One more node has a session."""
        self.welcomes += 1
        self.last_welcome = self.clock()

    def form(self, within: float, limit: float) -> dict[str, float]:
        """Let all nodes come, spread over so many seconds, and wait until all are in the round."""
        began = self.clock()
        for number in range(self.count):
            self.at(
                began + within * number / self.count,
                lambda number=number: self.joiners.append(Joiner(self, number)),  # type: ignore[misc]
            )
        while self.started < self.count and self.clock() < began + limit:
            self.turn()
        if self.started < self.count:
            raise TimeoutError(f"{self.started} of {self.count} nodes started, {self.welcomes} were welcome")
        return {
            "formed": self.clock() - began,
            "welcome": self.last_welcome - began,
            "dropped": self.dropped,
            "requests": self.requests / self.count,
        }

    def turn(self) -> None:
        """Wait for something to happen, and handle it."""
        while self._heap and self._heap[0][0] <= self.clock():
            heapq.heappop(self._heap)[2]()
        timeout = max(0.0, self._heap[0][0] - self.clock()) if self._heap else None
        for key, mask in self.selector.select(timeout):
            key.data.ready(mask)

    def close(self) -> None:
        """Close all connections."""
        for joiner in self.joiners:
            joiner.sock.close()
        self.selector.close()


def main() -> None:
    """Form a round at a store, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.join_crowd", description=__doc__)
    parser.add_argument("store", metavar="HOST:PORT")
    parser.add_argument("count", type=int)
    parser.add_argument("--within", type=float, default=0.0, help="the seconds in which all connect")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds to wait for the round")
    options = parser.parse_args()
    host, _, port = options.store.rpartition(":")
    crowd = Crowd((host.strip("[]"), int(port)), options.count, find_token())
    try:
        print(json.dumps(crowd.form(options.within, options.limit)), flush=True)
    finally:
        crowd.close()


if __name__ == "__main__":
    main()
