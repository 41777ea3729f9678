"""A job that is started again and again under one id, at a store that lasts: each time it must form."""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.rounds.leader_view import Options
from tests.simulation.simulator import Agent, Broken, Simulation

LIVES = 4
OPTIONS = Options(ttl=6.0, linger=float("inf"), join_timeout=20.0, prefix="job/")


def run_requeued(seed: int) -> None:
    """Its nodes come within the time of a few messages, so that several of them find the last job closed."""
    nodes = 2 + seed % 3
    options = replace(OPTIONS, min_nodes=nodes, max_nodes=nodes)
    sim = Simulation(seed, options, latency=(0.0005, 0.02))
    for life in range(LIVES):
        made: list[Agent] = []

        def come(number: int, life: int = life, made: list[Agent] = made) -> None:
            made.append(sim.join(f"node{number}", node_id=f"node{number}.{life}", slots=1))

        def all_run(made: list[Agent] = made) -> bool:
            return len(made) == nodes and all(agent.workers is not None for agent in made)

        for number in range(nodes):
            sim.at(sim.now + sim.random.uniform(0, 0.05), lambda number=number: come(number))  # type: ignore[misc]
        sim.run(sim.now + options.join_timeout / 2, stop=all_run)
        if not all_run():
            state = "; ".join(f"{a.id}: {a.ended.reason if a.ended else a.participant.reason}" for a in made)
            raise Broken(f"seed {seed}, life {life}: no world of {nodes} ({state})")
        for agent in made:
            sim.end_workers(agent, True)
        sim.run(sim.now + options.join_timeout, stop=lambda made=made: all(a.ended for a in made))  # type: ignore[misc]
        sim.run(sim.now + 2 * options.ttl)  # their leases run out
