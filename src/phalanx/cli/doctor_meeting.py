"""Doctors on several nodes that test the connections between them and compare their clocks.

Each watches `doctor/`, publishes its address and waits until all are there; then each publishes its wall
clock and connects to every other one. Each stays until all have tried, or the time is up. Phalanx uses no
wall clock of another node; the clocks matter to people who compare logs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from phalanx.cli.doctor import OK, PROBLEM, WARN, Asked, Finding
from phalanx.cli.doctor_network import reach

if TYPE_CHECKING:
    from phalanx.core.rounds.store_commands import Entry, Notice
    from phalanx.store.embedded.client import Client
    from phalanx.store.etcd.client import EtcdClient

FAR_APART = 1.0  # seconds between clocks that make logs hard to compare
_PREFIX = "doctor/"


class _Board:
    """What the doctors have published, and when it arrived here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seen: dict[str, tuple[Any, float]] = {}

    def note(self, entries: list[Entry], at: float) -> None:
        """Add new entries."""
        with self._changed:
            for entry in entries:
                value = _read(entry)
                if value is not None:
                    self._seen.setdefault(entry.key, (value, at))
            self._changed.notify_all()

    def noticed(self, notice: Notice) -> None:
        """The callback of the watch."""
        self.note([change.entry for change in notice.changes if not change.deleted], time.time())

    def of(self, kind: str) -> dict[str, tuple[Any, float]]:
        """Name → (value, this node's clock when it arrived)."""
        prefix = f"{_PREFIX}{kind}/"
        with self._changed:
            return {key.removeprefix(prefix): v for key, v in self._seen.items() if key.startswith(prefix)}

    def wait(self, kind: str, enough: Callable[[set[str]], bool], until: float) -> bool:
        """Wait until enough doctors have published this kind of entry."""
        with self._changed:
            return self._changed.wait_for(
                lambda: enough(set(self.of(kind))), max(0.0, until - time.monotonic())
            )


def _read(entry: Entry) -> Any:
    """What a doctor has published; None if no doctor of this version can have written it."""
    import msgspec

    kinds: dict[str, Any] = {"here": tuple[str, int], "clock": float, "done": bool}
    kind = entry.key.removeprefix(_PREFIX).partition("/")[0]
    try:
        return msgspec.json.decode(entry.value, type=kinds[kind])
    except (KeyError, msgspec.DecodeError):
        return None


def meet(client: Client | EtcdClient, asked: Asked) -> Iterator[Finding]:
    """Meet the other doctors; rows for each of them."""
    from phalanx.core.rounds.store_commands import Grant, Revoke

    until = time.monotonic() + asked.wait
    board, me = _Board(), f"{socket.gethostname()}-{os.getpid()}-{os.urandom(2).hex()}"
    lease = client.request(Grant(asked.wait + 10.0)).number

    def say(kind: str, what: object) -> None:
        client.put(f"{_PREFIX}{kind}/{me}", json.dumps(what).encode(), lease)

    own = _own(client, asked)
    with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET) as door:
        door.bind((own, 0))
        door.listen(1024)  # the kernel completes connections without accept()
        _, reply = client.watch(_PREFIX, board.noticed, prefix=True)
        # Other entries may be left over from an earlier meeting.
        board.note([entry for entry in reply.entries if entry.key.startswith(f"{_PREFIX}here/")], time.time())
        say("here", [asked.local_addr or door.getsockname()[0], door.getsockname()[1]])
        complete = board.wait("here", lambda names: len(names) >= asked.together, until)
        names = sorted(set(board.of("here")) - {me})
        count = f"{len(names) + 1} of {asked.together} nodes came"
        advice = f"{asked.wait:g} s were not enough: start doctor on the other nodes at the same time"
        yield Finding("meeting", count, OK if complete else PROBLEM, "" if complete else advice)
        say("clock", time.time())
        board.wait("clock", lambda said: said >= set(names), min(until, time.monotonic() + 5.0))
        for name in names:
            yield from _about(name, board)
        say("done", True)
        board.wait("done", lambda said: said >= set(names), until)
    client.request(Revoke(lease))


def _own(client: Client | EtcdClient, asked: Asked) -> str:
    """The address that this node has towards the store, unless one was given."""
    if asked.local_addr:
        return str(socket.getaddrinfo(asked.local_addr, None, type=socket.SOCK_STREAM)[0][4][0])
    family, _, _, _, where = socket.getaddrinfo(client.host, client.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing: it only consults the routing table
        return str(probe.getsockname()[0])


def _about(name: str, board: _Board) -> Iterator[Finding]:
    (address, port), _ = board.of("here")[name]
    short = name.rsplit("-", 2)[0]
    problem = reach(address, port)
    advice = "a firewall between the nodes? workers need all ports; several networks: --local-addr"
    yield Finding(
        f"way to {short}", problem or f"{address} answers", PROBLEM if problem else OK, advice * bool(problem)
    )
    said = board.of("clock").get(name)
    if said is None:
        yield Finding(f"clock of {short}", "unknown", WARN, "it left early; run doctor again")
        return
    offset = said[1] - said[0]
    late = abs(offset) > FAR_APART
    advice = "logs of different nodes are hard to compare: set up NTP or chrony" if late else ""
    yield Finding(f"clock of {short}", f"{offset:+.3f} s from this node's", WARN if late else OK, advice)
