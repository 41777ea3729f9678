"""Checks between nodes: they meet through the rendezvous, measure in pairs, and get one verdict.

    every node          here/<rank>: name, address, its own verdict, the backend of torch
    rank 0              plan/1: who measures with whom
    every node          clock/<rank>: its wall clock, after plan/1 has come and before rank 0 reads it
    both of a pair      result/1/<a>-<b>/<rank>: what this side has measured
    rank 0              plan/2, from the results of the first round: the slowest meet the fastest
    both of a pair      result/2/…
    rank 0              plan/3: nodes that were slow twice meet one that was not, while the others are idle
    rank 0              verdict: on every node, the same text everywhere
    every node          done/<rank>: the host of the store leaves last

Rank 0 alone decides, so that no two nodes see different results; it waits for each of them for a limited
time, and what has not come by then is missing. A node that is lost before it has begun is left out of the
pairs. If rank 0 is lost, the others could not tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.check.backend_process import BackendProcess
from phalanx.check.pair_link import ERRORS, PairLink
from phalanx.cluster.network_interface import VARIABLES, interface_of
from phalanx.core.diagnosis.fitness import (
    UNKNOWN,
    NodeVerdict,
    join_verdicts,
    judge_clocks,
    judge_network,
    rate_of_latency,
    suspects,
)
from phalanx.core.diagnosis.pairing import NodeGroup, confirming_round, first_round, overall, second_round
from phalanx.errors import StoreError, StoreTimeoutError
from phalanx.job.time_budgets import ARRIVAL, PAIR
from phalanx.store.net.token import Token

if TYPE_CHECKING:
    from phalanx.cluster.handler import RendezvousInfo

_LINK_LIMIT = 6.0  # seconds for all pairs of one node in one round, over TCP
_AFTER_LOSS = 5.0  # for the rest of them, once one is lost
_LONGEST = 3 * _LINK_LIMIT + 3 * PAIR  # that rank 0 may take for a round
_SLICE, _GLANCE = 0.5, 0.1
_CLOCKS = 2.0
_FAREWELL = 3.0


class Arrival(msgspec.Struct, frozen=True):
    """A node that takes part."""

    name: str
    address: str
    port: int
    fitness: str
    reason: str
    backend: str  # nccl, gloo or empty


class RoundPlan(msgspec.Struct, frozen=True):
    """One round: the pairs, and where a backend finds torch's store (empty: it is not measured)."""

    pairs: list[tuple[int, int]]
    peers: list[tuple[str, int]]  # of every node: where it accepts measurements
    backend: str
    store: tuple[str, int]


class PairFigures(msgspec.Struct, frozen=True):
    """What one side of a pair has measured; None: it could not, or the other side does."""

    latency: float | None = None
    bandwidth: float | None = None
    backend: float | None = None


class MeetingVerdict(msgspec.Struct, frozen=True):
    """What all nodes print: the verdicts as name, fitness and reason, and the rates of all pairs."""

    nodes: list[tuple[str, str, str]]
    pairs: list[tuple[int, str, str, dict[str, float]]]  # round, two names, rates
    notes: list[str]


class Measuring(msgspec.Struct, frozen=True):
    """What a node brings to the meeting."""

    address: str
    token: Any  # Token
    network: bool
    backend: bool
    environ: Mapping[str, str]
    clock: Callable[[], float] = time.time


def meet(
    joined: RendezvousInfo,
    lost: Callable[[], bool],
    hosting: bool,
    own: NodeVerdict,
    how: Measuring,
    backend: BackendProcess | None,
) -> MeetingVerdict:
    """Measure with the other nodes; StoreError if the meeting fell apart. `lost`: whether a node is.

    `hosting`: the store is in this process."""
    token: Token = how.token
    rank, count = joined.rank, joined.world_size
    with ExitStack() as stack:
        store = _MeetingBoard(joined.store, lost)
        link = PairLink(how.address, token)
        stack.callback(link.close)
        kind = backend.backend() if backend is not None else ""
        here = Arrival(own.node, how.address, link.port, own.fitness, own.reason, kind)
        store.set(f"here/{rank}", msgspec.json.encode(here))
        leader = _CheckLeader(store, count, how, stack) if rank == 0 else None
        node = _CheckedNode(store, rank, link, backend, how)
        for number in (1, 2, 3):
            if leader is not None:
                leader.plan(number)
            plan: RoundPlan = store.expect(f"plan/{number}", RoundPlan)
            if number == 1 and rank:
                store.set(f"clock/{rank}", msgspec.json.encode(how.clock()))
            if number == 1 and leader is not None:
                leader.compare_clocks()
            node.take_part(number, plan)
            if leader is not None:
                leader.collect(number, plan)
        if leader is not None:
            leader.decide()
        verdict: MeetingVerdict = store.expect("verdict", MeetingVerdict)
        store.part(rank, range(count) if hosting else ())
        return verdict


def start_backend(environ: Mapping[str, str], address: str) -> BackendProcess | None:
    """The process with torch, if torch is there; gloo is told the interface of this node's address."""
    if find_spec("torch") is None:
        return None
    name = "" if any(environ.get(variable) for variable in VARIABLES) else interface_of(address)
    more = dict.fromkeys((*VARIABLES, "NCCL_SOCKET_IFNAME"), name) if name and name != "lo" else {}
    return BackendProcess(environ, {k: v for k, v in more.items() if not environ.get(k)})


class _MeetingBoard:
    """What the nodes publish: each key once, in the store of the round."""

    def __init__(self, store: Any, lost: Callable[[], bool]) -> None:
        self._store, self._lost = store, lost

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, kind: Callable[..., Any], seconds: float, after_loss: float = _LONGEST) -> Any:
        """What another node has published; None: it has not, or it cannot be read.

        `after_loss`: seconds to wait once some node is known to be lost."""
        end = time.monotonic() + seconds
        while True:
            if self._lost():
                end = min(end, time.monotonic() + after_loss)
                after_loss = _LONGEST
            left = max(0.001, end - time.monotonic())
            try:
                self._store.wait([key], timedelta(seconds=min(left, _SLICE)))
                return msgspec.json.decode(self._store.get(key), type=kind)
            except StoreTimeoutError:
                if time.monotonic() >= end:
                    return None
            except msgspec.DecodeError:
                return None

    def expect(self, key: str, kind: Callable[..., Any]) -> Any:
        """What rank 0 publishes."""
        found = self.get(key, kind, ARRIVAL + _LONGEST, _LONGEST)
        if found is None:
            raise StoreTimeoutError("rank 0 of this check does not answer")
        return found

    def part(self, rank: int, others: Iterable[int]) -> None:
        """Leave; the host of the store waits until the others have."""
        try:
            self._store.set(f"done/{rank}", b"1")
            end = time.monotonic() + _FAREWELL
            for other in others:
                self.get(f"done/{other}", int, end - time.monotonic(), _SLICE)
        except StoreError:
            pass  # all that was to be said has been


class _CheckedNode:
    """A node's part in a round."""

    def __init__(
        self, store: _MeetingBoard, rank: int, link: PairLink, backend: BackendProcess | None, how: Measuring
    ) -> None:
        self._store, self._rank, self._link, self._backend, self._how = store, rank, link, backend, how

    def take_part(self, number: int, plan: RoundPlan) -> None:
        """Measure with each partner of this round, and publish it."""
        mine = [pair for pair in plan.pairs if self._rank in pair]
        found: dict[tuple[int, int], PairFigures] = {}
        until = time.monotonic() + _LINK_LIMIT
        # Those that this node dials first: whoever dials it waits for its turn, and may have dialed by then.
        for pair in sorted(mine, key=lambda pair: pair[0] != self._rank):
            found[pair] = self._over_tcp(number, plan, pair, until) if self._how.network else PairFigures()
        for pair in mine:
            figures = found[pair]
            reached = figures.bandwidth is not None or not self._how.network
            if plan.backend and self._backend is not None and reached:
                rate = self._backend.measure(
                    plan.backend,
                    plan.store,
                    f"{number}/{pair[0]}-{pair[1]}",
                    int(pair[1] == self._rank),
                    time.monotonic() + PAIR,
                )
                figures = PairFigures(figures.latency, figures.bandwidth, rate)
            self._store.set(_result(number, pair, self._rank), msgspec.json.encode(figures))

    def _over_tcp(self, number: int, plan: RoundPlan, pair: tuple[int, int], until: float) -> PairFigures:
        if pair[0] != self._rank:
            return PairFigures(bandwidth=self._link.received(number, pair[0], until))
        try:
            latency, rate = self._link.measure(number, self._rank, plan.peers[pair[1]])
        except ERRORS:
            return PairFigures()
        return PairFigures(latency, rate)


class _CheckLeader:
    """What rank 0 does besides."""

    def __init__(self, store: _MeetingBoard, count: int, how: Measuring, stack: ExitStack) -> None:
        self._store, self._count, self._how, self._stack = store, count, how, stack
        self._nodes: list[Arrival] = []
        self._rounds: dict[int, dict[NodeGroup, dict[str, float]]] = {}
        self._backend, self._where = "", ("", 0)
        self._notes: list[str] = []
        self._planned = 0.0
        self._clocks: dict[int, tuple[float, float]] = {}

    def plan(self, number: int) -> None:
        if number == 1:
            self._welcome()
            pairs = first_round([rank for rank, node in enumerate(self._nodes) if node.port])
        elif number == 2:
            pairs = second_round(overall(self._rounds[1]))
        else:
            rounds = self._rounds.values()
            slow = suspects([node.name for node in self._nodes], *rounds)
            pairs = confirming_round(slow, *(overall(results) for results in rounds))
        peers = [(node.address, node.port) for node in self._nodes]
        plan = RoundPlan([(a, b) for a, b in pairs], peers, self._backend, self._where)
        self._planned = self._how.clock()
        self._store.set(f"plan/{number}", msgspec.json.encode(plan))

    def compare_clocks(self) -> None:
        """How far each clock can be ahead of this one, at least and at most: it was read in between."""
        end = time.monotonic() + _CLOCKS
        self._clocks[0] = (0.0, 0.0)
        for rank, node in enumerate(self._nodes[1:], 1):
            there = self._store.get(f"clock/{rank}", float, end - time.monotonic()) if node.port else None
            if there is not None:
                self._clocks[rank] = (there - self._how.clock(), there - self._planned)

    def _welcome(self) -> None:
        """Everyone is here; which backend all of them have."""
        end = time.monotonic() + ARRIVAL
        for rank in range(self._count):
            node = self._store.get(f"here/{rank}", Arrival, end - time.monotonic(), _AFTER_LOSS)
            if node is None:
                node = Arrival(f"rank {rank}", "", 0, UNKNOWN, "it was lost before it was measured", "")
            self._nodes.append(node)
        kinds = {node.backend for node in self._nodes if node.port}
        if not self._how.backend:
            return
        if "" in kinds:
            missing = [node.name for node in self._nodes if node.port and not node.backend]
            where = "any node" if len(missing) == self._count else ", ".join(missing[:5])
            self._notes.append(f"no backend was measured: there is no torch on {where}")
            return
        from phalanx.store.tcpstore.server import TorchStoreServer

        self._backend = "nccl" if kinds == {"nccl"} else "gloo"
        server = TorchStoreServer(self._how.address)
        self._stack.callback(server.close)
        server.start()
        self._where = (self._how.address, server.address[1])

    def collect(self, number: int, plan: RoundPlan) -> None:
        """The results of a round; the sides of a pair together have all of its rates."""
        end = time.monotonic() + 2 * _LINK_LIMIT + 2 * PAIR * bool(plan.backend)
        results: dict[NodeGroup, dict[str, float]] = {}
        for pair in plan.pairs:
            results[pair] = _rates(self._sides(number, pair, plan.backend, end), plan.backend)
        self._rounds[number] = results

    def _sides(self, number: int, pair: tuple[int, int], backend: str, end: float) -> list[PairFigures]:
        """What both sides have measured; of one that has failed, the other side does not matter."""
        found: dict[int, PairFigures] = {}
        while len(found) < 2:
            for rank in pair:
                if rank not in found:
                    figures = self._store.get(_result(number, pair, rank), PairFigures, _GLANCE)
                    if figures is not None:
                        found[rank] = figures
            failed = any(
                (self._how.network and one.bandwidth is None) or (backend and one.backend is None)
                for one in found.values()
            )
            if failed or time.monotonic() >= end:
                break
        return [found.get(rank, PairFigures()) for rank in pair]

    def decide(self) -> None:
        names = _distinct([(node.name, node.address) for node in self._nodes])
        between: Sequence[NodeVerdict] = ()
        if self._how.network or self._backend:
            between = judge_network(names, *self._rounds.values())
        clocks = judge_clocks(names, self._clocks)
        nodes = []
        for index, node in enumerate(self._nodes):
            own = NodeVerdict(names[index], node.fitness, node.reason)
            joined = join_verdicts([own, *between[index : index + 1], clocks[index]])
            nodes.append((joined.node, joined.fitness, joined.reason))
        pairs = [
            (number, names[a], names[b], rates)
            for number, results in self._rounds.items()
            for (a, b), rates in results.items()
        ]
        self._store.set("verdict", msgspec.json.encode(MeetingVerdict(nodes, pairs, self._notes)))


def _rates(sides: Sequence[PairFigures], backend: str) -> dict[str, float]:
    """The rates of a pair: the slower direction counts; what one side lacks is missing."""
    found: dict[str, float] = {}
    bandwidths = [side.bandwidth for side in sides if side.bandwidth]
    if len(bandwidths) == 2:
        found["bandwidth"] = min(bandwidths)
    for side in sides:
        if side.latency is not None:
            found["latency"] = rate_of_latency(side.latency)
    backends = [side.backend for side in sides if side.backend]
    if backend and len(backends) == 2:
        found[backend] = min(backends)
    return found


def _result(number: int, pair: tuple[int, int], rank: int) -> str:
    return f"result/{number}/{pair[0]}-{pair[1]}/{rank}"


def _distinct(nodes: Sequence[tuple[str, str]]) -> list[str]:
    """Names, with the address where several nodes have the same one."""
    names = [name for name, _ in nodes]
    return [f"{name} ({where})" if names.count(name) > 1 else name for name, where in nodes]
