"""How many messages rounds cost, counted in the simulator.

`python -m tests.simulation.scale docs/scale.md` writes the page.

The run: n nodes start within a second, form a round of exactly n, one node's workers fail, all
re-form, all succeed, all end. Keep-alives are counted apart: they depend on time, not on rounds.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from phalanx.core.leader_view import Options
from phalanx.core.participant_events import StartRound
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
