"""A job in which everything goes wrong for a while, and then nothing does: it must end."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from phalanx.core.rounds.causes import HOSTS
from phalanx.core.rounds.leader_view import Options
from phalanx.core.rounds.participant_events import StartRound
from phalanx.core.rounds.quarantine import QuarantinePolicy
from tests.simulation.simulator import Agent, Broken, Simulation


class Outcome(NamedTuple):
    """How a run ended; equal for equal seeds."""

    seed: int
    ends: tuple[tuple[str, str], ...]
    rounds: int
    finished_at: float
    messages: tuple[int, int, int]
    trace: tuple[str, ...]


class Chaos:
    """One seeded run: a plan of faults over a simulation."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        pick = Simulation(seed, Options()).random
        nodes = pick.randint(1, 7)
        fixed = pick.random() < 0.4
        low = nodes if fixed else pick.randint(1, nodes)
        high = low if fixed else pick.choice([low, nodes, nodes + 2])
        options = Options(
            min_nodes=low,
            max_nodes=max(low, high),
            max_restarts=pick.randint(0, 4),
            join_timeout=pick.choice([20.0, 60.0]),
            last_call=pick.choice([0.0, 0.5, 2.0]),
            ttl=pick.choice([2.0, 6.0]),
            store_grace=40.0,
            fixed=fixed,
            batch=pick.choice([1, 2, 100]),
            prefix="job/",
        )
        # A store with a journal shortens no lease; its restart has the time of a lease.
        linger = pick.choice([1.0, float("inf")])
        options = replace(options, linger=linger)
        # Of its own, so that the runs of earlier seeds stay what they were.
        self.keeper = random.Random(f"quarantine {seed}")
        if self.keeper.random() < 0.6:
            times = self.keeper.choice([1, 2, 3]), 60.0, self.keeper.choice([3.0, 40.0])
            options = replace(options, quarantine=QuarantinePolicy(*times))
        worst = pick.choice([0.005, 0.05, 0.4])
        self.sim = Simulation(seed + 1_000_003, options, latency=(0.0005, worst))
        self.sim.tracing = tracing
        self.sim.on_start = self._workers
        self.sim.stop_time = lambda: self.sim.random.choice([0.0, 0.05, 1.5])
        self.seed, self.nodes = seed, nodes
        self.work = pick.choice([0.1, 5.0, 25.0])
        self.fail_chance = pick.choice([0.0, 0.1, 0.5])
        self.calm_at = 50.0
        self.sim.duplicates = pick.choice([0.0, 0.2])
        self.sim.reorder = pick.choice([0.0, 0.2])
        self.sim.kill_time = pick.choice([0.0, 0.08])
        self.loss = self.sim.loss = pick.choice([0.0, 0.0, 0.02, 0.08])
        self.newer = pick.choice([0.0, 0.0, 0.5])  # how many nodes are of a later version
        self.sim.silence = pick.choice([0.0, 0.0, 0.02, 0.08])
        self.born = 0

    def run(self) -> Outcome:
        """Play it to the end; raises Broken when an invariant fails or nothing more happens."""
        sim, chance = self.sim, self.sim.random
        for _ in range(self.nodes):
            sim.at(chance.choice([0.0, chance.uniform(0, 5), chance.uniform(0, 30)]), self._new_node)
        for _ in range(chance.randint(0, 14)):
            sim.at(chance.uniform(0, self.calm_at), self._fault)
        for _ in range(self.keeper.choice([0, 0, 4, 12])):
            sim.at(self.keeper.uniform(0, self.calm_at), self._keep_out)
        sim.at(self.calm_at, self._calm)
        # After the last fault: a re-form, the work, or a time-out, each a few times over.
        limit = self.calm_at + 400.0
        sim.run(limit, stop=lambda: sim.now > self.calm_at and not self._alive())
        stuck = [a.id for a in self._alive()]
        if stuck:
            raise Broken(f"seed {self.seed}: {' '.join(stuck)} neither ended nor progressed")
        ends = tuple((a.id, a.ended.outcome if a.ended else "dead") for a in sim.agents.values())
        m = sim.messages
        return Outcome(
            self.seed,
            ends,
            max(sim.rounds, default=0),
            round(sim.now, 6),
            (m["requests"], m["replies"], m["notices"]),
            tuple(sim.trace),
        )

    def _alive(self) -> list[Agent]:
        return [a for a in self.sim.agents.values() if a.alive and a.ended is None]

    def _new_node(self, rank: int | None = None) -> None:
        """A node; in a fixed job the first ones have the ranks of a job that is started correctly."""
        self.born += 1
        name = f"node{self.sim.random.randint(1, 12)}"
        if not self.sim.options.fixed:
            rank = -1
        elif rank is None:
            rank = self.born - 1 if self.born <= self.nodes else self.sim.random.randrange(self.nodes)
        made = self.sim.join(
            name, node_id=f"{name}.{self.born}", slots=self.sim.random.randint(1, 3), rank=rank
        )
        made.version = 2 if self.sim.random.random() < self.newer else 1

    def _replace(self, agent: Agent) -> None:
        if self.sim.random.random() < (0.9 if self.sim.options.fixed else 0.6):
            rank = agent.participant.info.rank
            self.sim.at(self.sim.now + self.sim.random.choice([0.1, 5.0]), lambda: self._new_node(rank))

    def _calm(self) -> None:
        self.fail_chance = self.sim.duplicates = self.sim.reorder = 0.0
        self.sim.loss = self.sim.silence = 0.0

    def _workers(self, agent: Agent, start: StartRound) -> None:
        chance, run = self.sim.random, agent.run_number
        ok = chance.random() >= self.fail_chance
        when = self.work if ok else chance.uniform(0, self.work)

        def end() -> None:
            if agent.alive and agent.workers == start.round.number and agent.run_number == run:
                self.sim.end_workers(agent, ok, "exit code 1")

        self.sim.at(self.sim.now + when, end)

    def _fault(self) -> None:
        sim, chance = self.sim, self.sim.random
        alive = self._alive()
        kind = chance.choice(KINDS)
        if kind in ("store", "back"):
            if kind == "back" and chance.random() < 0.7:
                sim.keep()
                sim.at(sim.now + chance.choice([0.01, 0.3, 5.0]), lambda: self._go_back())
            elif sim.store_up:
                sim.stop_store(chance.choice([0.05, 3.0, 15.0]))
            return
        if kind == "foreign":
            self._foreign()
            return
        if kind == "join":
            self._new_node()
            return
        if not alive:
            return
        agent = chance.choice(alive)
        if kind in ("crash", "host"):
            sim.crash(agent, host=kind == "host")
            self._replace(agent)
        elif kind == "sleep":
            sim.sleep(agent, chance.choice([0.5, 4.0, 15.0]))
        elif kind == "cut":
            victims = [agent] if chance.random() < 0.5 else alive[: max(1, len(alive) // 2)]
            seconds = chance.choice([0.5, 3.0, 12.0])
            for victim in victims:
                sim.cut(victim, seconds)
        elif kind == "cut1":
            up = chance.random() < 0.5
            sim.cut(agent, chance.choice([1.0, 10.0]), up=up, down=not up)
        elif kind == "break":
            if not agent.asleep:
                agent.locked_out = sim.now + chance.choice([0.0, 0.8, 3.0])
                sim.break_connection(agent)
        elif kind == "refuse":
            sim.refuse(agent, chance.choice([0.5, 4.0, 20.0]), told=chance.random() < 0.5)
        elif kind == "unfit":
            sim.unfit(agent, "no such program")
            self._replace(agent)
        elif kind in ("leave", "preempt"):
            sim.leave(agent, "SIGTERM", preempted=kind == "preempt")
            if sim.options.fixed:
                self._replace(agent)
        elif kind == "drain" and sim.store_up:
            sim.put(f"{sim.options.prefix}drain/{agent.id}", b"")

    def _keep_out(self) -> None:
        """A person quarantines a host, or removes it; or the host is slow; or the record is damaged."""
        sim, chance = self.sim, self.keeper
        if not sim.store_up or not sim.agents:
            return
        host = sim.agents[chance.choice([*sim.agents])].name
        key, number = f"{sim.options.prefix}{HOSTS}{host}", max(sim.rounds, default=1)
        what = chance.choice(["add", "remove", "slow", "slow", "cool", "foreign"])
        if what == "add":
            sim.put(key, b'{"reason":"by hand","left":-1}')
        elif what == "remove":
            sim.delete(key)
        elif what == "cool":
            sim.put(key, b'{"reason":"for a while","left":2.5,"offences":[1,2]}')
        elif what == "slow":
            sim.put(f"{sim.options.prefix}slow/{number}/{host}", b"2 steps/s, median 5")
        else:
            sim.put(key, chance.choice(JUNK))

    def _go_back(self) -> None:
        if self.sim.store_up:
            self.sim.stop_store(self.sim.random.choice([0.05, 3.0]), back=True)

    def _foreign(self) -> None:
        """Another program writes where the job's records are, or deletes one."""
        sim, chance = self.sim, self.sim.random
        if not sim.store_up:
            return
        node = chance.choice([*sim.agents, "stranger"])
        number = max(sim.rounds, default=1)
        keys = [f"node/{node}", f"place/{node}", f"result/{number}/{node}", f"result/x/{node}", "members"]
        key = sim.options.prefix + chance.choice([*keys, "ctl/round", "ctl/leader", "ctl/x", "status"])
        # Not a node's key: to delete it is to remove the node without a word to it. Its lease goes on, so it
        # runs its workers until it sees the next round, and the leader takes it for gone. No record can
        # prevent that: only a holder of the token can write there, and nothing is promised against those.
        if chance.random() < 0.2 and "node/" not in key:
            sim.delete(key)
        else:
            sim.put(key, chance.choice(JUNK))


KINDS = (
    "crash", "host", "sleep", "cut", "cut1", "break", "store", "leave", "drain", "join",
    "refuse", "preempt", "unfit", "foreign", "back",
)  # fmt: skip
JUNK = (
    b"", b"[", b"\xff\xfe", b"{}", b"null", b"7", b'"text"', b'{"number":"one"}', b'{"phase":"active"}',
    b'{"phase":"closed"}', b'{"ok":"yes"}', b'{"ok":false}', b'{"nodes":7,"stamp":1}', b'{"info":{"id":7}}',
    b'{"stamp":"1.1","incarnation":1,"rank":-7}', b'{"info":{"id":"x","name":"x"},"ready":-1}',
    b'{"number":1,"phase":"forming","job":9}', b'{"refused":"go away"}',
)  # fmt: skip


def run_seed(seed: int, *, tracing: bool = False) -> Outcome:
    """One run from nothing but its seed."""
    return Chaos(seed, tracing=tracing).run()
