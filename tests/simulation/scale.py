"""How many messages rounds cost, counted in the simulator.

`python -m tests.simulation.scale docs/scale.md` writes the page.

The run: n nodes start within a second, form a round of exactly n, one node's workers fail, all
re-form, all succeed, all end. Keep-alives are counted apart: they depend on time, not on rounds.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from phalanx.core.rounds.leader_view import Options
from phalanx.core.rounds.participant_events import StartRound
from tests.simulation.simulator import Agent, Broken, Simulation


class Figures(NamedTuple):
    """Messages (requests, replies and notices together) of each phase of the run, and the bytes of values."""

    nodes: int
    first_round: int
    reform: int
    end: int
    per_node: float
    first_megabytes: float
    megabytes: float


def measure(nodes: int) -> Figures:
    """Count the messages of one run."""
    options = Options(min_nodes=nodes, max_nodes=nodes, ttl=600.0, join_timeout=900.0, store_grace=900.0)
    sim = Simulation(7, options, latency=(0.0002, 0.002))
    started: dict[int, int] = {}

    def note(agent: Agent, start: StartRound) -> None:
        started[start.round.number] = started.get(start.round.number, 0) + 1

    def total() -> int:
        return sim.messages["requests"] + sim.messages["replies"] + sim.messages["notices"]

    sim.on_start = note
    for number in range(nodes):
        sim.at(sim.random.random(), lambda number=number: sim.join(f"node{number}"))
    sim.run(150.0, stop=lambda: started.get(1) == nodes)
    formed, first_bytes = total(), sim.messages["bytes"]
    sim.end_workers(sim.agents["node0"], False, "exit code 1")
    sim.run(150.0, stop=lambda: started.get(2) == nodes)
    reformed = total()
    for agent in sim.agents.values():
        sim.end_workers(agent, True)
    sim.run(150.0, stop=lambda: sim.ended == nodes)
    if not all(a.ended and a.ended.outcome == "succeeded" for a in sim.agents.values()):
        raise Broken(f"{nodes} nodes did not all succeed")
    everything = total()
    return Figures(
        nodes,
        formed,
        reformed - formed,
        everything - reformed,
        everything / nodes,
        first_bytes / 1e6,
        sim.messages["bytes"] / 1e6,
    )


TEXT = """# How rounds scale

Counted in the simulator (`tests/simulation/scale.py`), which runs the real rendezvous and store: n
nodes start within one second and form a round; the workers of one node fail and all nodes re-form;
all succeed and end. A message is one request, reply or notice. Keep-alives come on top: one request
and one reply per node in each third of a lease.

| nodes | first round | re-formed round | end | messages per node | bytes, first round | bytes, whole run |
|---:|---:|---:|---:|---:|---:|---:|
{rows}

Messages and bytes grow linearly: about {each:,.0f} bytes per node for a first round at {nodes:,} nodes. Every
node watches the round, which has no list of members, and its own place, which has its rank and the
sizes. The leader alone sees all nodes; the list of members is one key that is read on demand.

## What joining costs the store

Measured with `python -m bench.joins`: `phalanx store` in a process of its own, and n real participants in
another (`tests/support/join_crowd.py`), which connect at once or within one second and form a round. The
CPU time is the store's, for everything from the first connection until all nodes can start their workers.

| nodes | all at once | within 1 s | connections that the store closed |
|---:|---:|---:|---:|
| 100 | 0.51 ms | 0.72 ms | 0 |
| 500 | 0.62 ms | 0.44 ms | 0 |
| 1,000 | 0.51 ms | 0.51 ms | 0 |
| 2,000 | 0.61 ms | 0.44 ms | 0 |

These are milliseconds per node on two cores with a load of 35. The store's loop handles everything that has
arrived in one turn and writes to each connection once per turn, so a node costs less the more nodes come at
a time. Most of the rest is the kernel's: six writes per node, three of them until its Welcome.

A node joins a store without a round with one command: a lease, the node's key on it, and the leader's key
if there is none yet. Its two watches travel with that. In etcd the command is one grant and one
transaction.

The store holds up to 4,096 connections that have not proved the token yet, and never more than a quarter of
its descriptors (`ulimit -n`, which `phalanx store` raises as far as it may), of which every node needs one.
Each step of the handshake has 5 s of the time in which the store waits for its peers: a store that is
itself late does not time them out.
"""


def page(sizes: tuple[int, ...] = (10, 100, 1000, 10_000)) -> str:
    """The text of docs/scale.md."""
    figures = [measure(n) for n in sizes]
    rows = "\n".join(
        f"| {f.nodes:,} | {f.first_round:,} | {f.reform:,} | {f.end:,} | {f.per_node:.1f} "
        f"| {f.first_megabytes:,.2f} MB | {f.megabytes:,.2f} MB |"
        for f in figures
    )
    last = figures[-1]
    return TEXT.format(rows=rows, each=last.first_megabytes * 1e6 / last.nodes, nodes=last.nodes)


def write(path: str) -> None:
    """Write the page."""
    with open(path, "w") as file:
        file.write(page())


if __name__ == "__main__":
    write(sys.argv[1]) if len(sys.argv) > 1 else print(page())
