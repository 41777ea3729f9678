"""Runs episodes: starts a job, applies the plan's faults, checks the invariants, ends the job, checks again.

One thread, one clock. Everything is looked at from outside: files, /proc, exit codes and `phalanx status`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tests.chaos import invariants
from tests.chaos.invariants import AgentExit, CpuSample, Disturbance, LifeSigns, StatusAnswer, Violation
from tests.chaos.job import TTL, UNKNOWN, ChaosAgent, ChaosJob, signal_process
from tests.chaos.private_network import PrivateNetwork
from tests.chaos.schedule import FATAL_CODE, FAULTS, STORE, ChaosAction, EpisodePlan

# Bounds in seconds. They allow for a loaded machine; docs/chaos.md lists them beside what is promised.
FORM = 30.0  # until the first complete world
SETTLE = 4.5  # after the last undone fault: nodes without workers reconnect, and idle agents are measured
RECOVER = 30.0  # from then until the world is complete
END = 30.0  # until all agents have ended
LEFT = 2.0  # after an agent's end; one second is promised
WHOLE = TTL + 5.0  # a round without one of its ranks
STATUS = 5.0
STATUS_HUNG = 15.0
_FOREVER = float("inf")
_LOOK = 0.5  # between two checks
_STEP = 0.03


class Bounds(NamedTuple):
    """What a user may tighten or loosen."""

    idle: float = 0.25  # of a core


class EpisodeResult(NamedTuple):
    """The outcome of one episode."""

    plan: EpisodePlan
    seconds: float
    applied: tuple[str, ...]
    rounds: int
    violations: tuple[Violation, ...]
    folder: str
    processes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "seed": self.plan.seed,
            "plan": {**self.plan._asdict(), "actions": [str(action) for action in self.plan.actions]},
            "seconds": round(self.seconds, 1),
            "applied": self.applied,
            "rounds": self.rounds,
            "violations": [violation._asdict() for violation in self.violations],
            "processes": self.processes,
            "folder": self.folder,
        }


def run_episode(
    plan: EpisodePlan, folder: Path, *, isolated: bool, network: bool, bounds: Bounds
) -> EpisodeResult:
    """One episode, from the first process to the last."""
    folder.mkdir(parents=True)
    names = ["store", *(f"n{number}" for number in range(plan.nodes))]
    switch = PrivateNetwork(names) if network else None
    try:
        return Episode(plan, folder, switch, isolated, bounds).run()
    finally:
        if switch is not None:
            switch.close()


class Episode:
    """The state of a running episode."""

    def __init__(
        self, plan: EpisodePlan, folder: Path, network: PrivateNetwork | None, isolated: bool, bounds: Bounds
    ) -> None:
        self.plan, self.folder, self.network, self.bounds = plan, folder, network, bounds
        self.job = ChaosJob(plan, folder, network, isolated)
        self.began = time.time()
        self.disturbances: list[Disturbance] = []
        self.violations: list[Violation] = []
        self.applied: list[str] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._cpu: list[CpuSample] = []
        self._next_look = 0.0
        self._finished = _FOREVER
        self._asking: tuple[subprocess.Popen[bytes], ChaosAgent, float] | None = None
        self._asked = 0
        self._seen: tuple[str, ...] = ()

    def run(self) -> EpisodeResult:
        """To the end, whatever happens."""
        try:
            self._play()
        finally:
            if self._asking is not None:
                self._asking[0].kill()
                self._asking[0].communicate()
            signs = self.job.signs()
            self.job.clear()
        result = EpisodeResult(
            self.plan,
            time.time() - self.began,
            tuple(self.applied),
            len({sign.world for sign in signs}),
            tuple(self.violations),
            str(self.folder),
            self._seen,
        )
        (self.folder / "episode.json").write_text(json.dumps(result.as_json(), indent=1, default=str))
        return result

    def _play(self) -> None:
        self.job.start_store()
        for number in range(self.plan.nodes):
            if number not in self.plan.late:
                self.job.start_agent(number)
        if not self._until(self._complete, FORM, "the first complete world"):
            return
        start = time.time()
        for action in self.plan.actions:
            if not self._watch_until(start + action.at):
                return
            self._apply(action)
        if not self._until(lambda: not self._undo, _FOREVER):
            return
        self._note("recover")
        if not self._watch_until(time.time() + SETTLE):
            return
        if self._until(self._complete, RECOVER, "a complete world after the last fault"):
            self._end()
        if not self.violations:
            self._watch_until(time.time() + LEFT + 2 * _LOOK)
        if not self.violations:
            self._check_output()

    # -- waiting and checking --------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], bound: float, what: str = "") -> bool:
        """Check the invariants until `done`; False after a violation, one of which is to take too long."""
        limit = time.time() + bound
        while not done():
            now = time.time()
            for at, undo in [one for one in self._undo if one[0] <= now]:
                self._undo.remove((at, undo))
                undo()
            if now >= self._next_look:
                self._next_look = now + _LOOK
                self._look(now)
            if self.violations:
                self._seen = tuple(f"{p.owner} {p.pid} {p.what}" for p in self.job.processes())
                return False
            if now > limit:
                found = self._state_of_world(now)
                text = f"{what} did not appear within {bound:g} s: {found}"
                self.violations.append(Violation("liveness", now, text))
            time.sleep(_STEP)
        return not self.violations

    def _watch_until(self, at: float) -> bool:
        return self._until(lambda: time.time() >= at, _FOREVER)

    def _look(self, now: float) -> None:
        signs = self.job.signs()
        found = invariants.one_world(signs, self.disturbances)
        found += invariants.ranks(signs)
        found += invariants.whole(signs, self.disturbances, now, WHOLE, self._finished)
        self._cpu = [s for s in self._cpu if s.at > now - 20] + self.job.cpu()
        starts = [sign.beats[0] for sign in signs if sign.beats]
        starts += [agent.started for agent in self.job.agents] + [a.ended for a in self.job.agents if a.ended]
        found += invariants.idle(self._cpu, self.disturbances, starts, self.bounds.idle)
        ended = {agent.owner: agent.ended for agent in self.job.agents if not agent.alive}
        if len(ended) == len(self.job.agents):
            ended[UNKNOWN] = max(ended.values())
        processes = self.job.processes()
        found += invariants.nothing_left(processes, ended, self.disturbances, now, LEFT)
        for agent in self.job.agents:
            if agent.alive and agent.asked and now - agent.asked > END:
                found += invariants.endings([AgentExit(agent.owner, now, None, (), _tail(agent))])
            if not agent.alive and agent.expected is None:
                agent.expected = ()
                if self._may_give_up(agent):
                    continue
                text = f"{agent.owner} exited with {agent.code} while the job was running; its last lines: "
                found.append(Violation("exit code", agent.ended, text + _tail(agent)))
        found += self._ask(now)
        self.violations += found

    def _may_give_up(self, agent: ChaosAgent) -> bool:
        """An address that refuses connections for seconds is a lost store where the store has no journal."""
        refusals = [d for d in self.disturbances if d.fault == "refuse" and d.node == agent.node]
        return self.plan.hosted and any(d.covers(agent.ended, 1.0) for d in refusals)

    def _ask(self, now: float) -> list[Violation]:
        """`phalanx status`, one node after the other."""
        if self._asking is None:
            able = [a for a in self.job.agents if a.alive and a.expected is None and now - a.started > 3.0]
            if able:
                self._asked += 1
                agent = able[self._asked % len(able)]
                self._asking = self.job.ask_status(agent.node), agent, now
            return []
        process, agent, asked = self._asking
        if process.poll() is None and now - asked < STATUS_HUNG:
            return []
        process.kill()
        text, _ = process.communicate()
        self._asking = None
        if not agent.alive or agent.expected is not None:
            return []
        answered = any(job["pid"] == agent.process.pid for job in json.loads(text or b"[]"))
        answer = StatusAnswer(agent.node, asked, now - asked, answered)
        return invariants.answers([answer], self.disturbances, STATUS)

    def _complete(self) -> bool:
        there = sum(self.job.agent(number) is not None for number in range(self.plan.nodes))
        size = min(self.plan.maximum, there) * self.plan.workers
        return invariants.is_complete(self.job.signs(), size, time.time())

    def _state_of_world(self, now: float) -> str:
        alive = [sign for sign in self.job.signs() if sign.beats and sign.beats[-1] > now - 1]
        agents = " ".join(agent.owner for agent in self.job.agents if agent.alive)
        return f"agents {agents}; " + ("; ".join(sign.name for sign in alive) or "no worker runs")

    # -- faults ----------------------------------------------------------------------------------------

    def _apply(self, action: ChaosAction) -> None:
        """Do it, and plan how it is undone; skipped where the victim does not exist."""
        agent = self.job.agent(action.node) if action.node != STORE else None
        area = FAULTS[action.fault].area
        if action.fault in ("node-join", "bad-newcomer"):
            done = self._join(action)
        elif action.node == STORE:
            done = self._kill_store(action)
        elif area == "link":
            done = self._link(action)
        elif area == "disk":
            self._fill_disk(action)
            done = True
        elif action.fault == "idle-helper-kill":
            done = self._kill_idle_helpers()
        elif agent is None:
            done = False
        elif area == "life":
            done = self._remove(action, agent)
        else:
            done = self._signal(action, agent)
        if not done:
            self._note(f"skipped: {action}")
            return
        self._note(str(action))
        where = "store" if action.node == STORE else self.job.names[action.node]
        now = time.time()
        lasts = action.seconds if FAULTS[action.fault].longest else 0.0
        self.disturbances.append(Disturbance(action.fault, where, now, now + lasts))

    def _note(self, text: str) -> None:
        self.applied.append(f"{time.time() - self.began:.2f} {text}")

    def _after(self, action: ChaosAction, undo: Callable[[], object]) -> None:
        def noted() -> None:
            undo()
            self._note(f"undone: {action.fault} n{action.node}")
            now = time.time()
            self.disturbances.append(Disturbance("undo", f"n{action.node}", now, now))

        self._undo.append((time.time() + action.seconds, noted))

    def _signal(self, action: ChaosAction, agent: ChaosAgent) -> bool:
        victim, _, kind = action.fault.partition("-")
        zygotes, keepers = self.job.helpers(agent)
        workers = [sign.pid for sign in self.job.workers(action.node)]
        if victim == "node":
            pids = [process.pid for process in self.job.processes() if process.owner == agent.owner]
        else:
            choice = {"worker": workers, "agent": [agent.process.pid], "zygote": zygotes, "keeper": keepers}
            pids = choice[victim][action.worker if victim == "worker" else 0 :][:1] or choice[victim][:1]
        if not pids:
            return False
        if kind == "exit":
            self._let_exit(pids[0], action.value)
            return True
        stops = kind in ("stop", "freeze")
        if stops:
            self._after(action, lambda: _signal_all(pids, signal.SIGCONT))
        return _signal_all(pids, signal.SIGSTOP if stops else signal.SIGKILL)

    def _kill_idle_helpers(self) -> bool:
        for number in range(self.plan.nodes):
            agent = self.job.agent(number)
            if agent and time.time() - agent.started > 1.5 and not self.job.workers(number, 2.0):
                zygotes, keepers = self.job.helpers(agent)
                return _signal_all((*zygotes, *keepers), signal.SIGKILL)
        return False

    def _remove(self, action: ChaosAction, agent: ChaosAgent) -> bool:
        leaves = action.fault == "node-leave"
        agent.killed, agent.expected = not leaves, (143,) if leaves else (137,)
        agent.asked = time.time()
        signal_process(agent.process.pid, signal.SIGTERM if leaves else signal.SIGKILL)
        # It stays stopped otherwise: another action may have stopped it, and SIGTERM has to be handled.
        signal_process(agent.process.pid, signal.SIGCONT)
        if action.seconds:
            clock = action.value * 3600 if action.fault == "clock" else 0
            self._after(action, lambda: self._replace(agent, action.node, clock))
        return True

    def _replace(self, old: ChaosAgent, node: int, clock: int = 0) -> None:
        if old.alive:  # it still leaves
            self._undo.append((time.time() + 0.2, lambda: self._replace(old, node, clock)))
        elif self.job.agent(node) is None:
            self.job.start_agent(node, clock)

    def _join(self, action: ChaosAction) -> bool:
        if action.fault == "bad-newcomer":
            self._fill_disk(action)
        agent = self.job.start_agent(action.node)
        if action.fault == "bad-newcomer":
            agent.expected = ()  # it may give up, in whatever way
            agent.killed = True
        return True

    def _fill_disk(self, action: ChaosAction) -> None:
        filler = self.job.logs(self.job.names[action.node]) / "filler"
        with open(filler, "wb", buffering=0) as file:
            for block in (1 << 16, 1):
                try:
                    while file.write(bytes(block)):
                        pass
                except OSError:
                    pass
        self._after(action, lambda: filler.unlink(missing_ok=True))

    def _link(self, action: ChaosAction) -> bool:
        network, node = self.network, self.job.names[action.node]
        assert network is not None
        store = "n0" if self.plan.hosted else "store"
        switch: dict[str, Callable[[bool], None]] = {
            "cut": lambda on: network.cut(node, on),
            "refuse": lambda on: network.refuse(node, store, on),
            "reset": lambda on: network.refuse(node, store, on),
            "delay": lambda on: network.delay(node, on),
            "cut-one-way": lambda on: network.cut_one_way(
                *((node, store) if action.value % 2 else (store, node)), on=on
            ),
        }
        switch[action.fault](True)
        agent = self.job.agent(action.node)

        def mend() -> None:
            switch[action.fault](False)
            if agent is not None and not agent.alive and not agent.asked and self._may_give_up(agent):
                self._replace(agent, action.node)

        self._after(action, mend)
        return True

    def _kill_store(self, action: ChaosAction) -> bool:
        store = self.job.store
        if store is None:
            return False
        store.kill()
        store.wait()
        self._after(action, self.job.start_store)
        return True

    # -- the end ---------------------------------------------------------------------------------------

    def _end(self) -> None:
        """End the job in the planned way; every agent has to end with the right code and report."""
        signs = [sign for n in range(self.plan.nodes) for sign in self.job.workers(n, 1.0)]
        victim = signs[self.plan.seed % len(signs)]
        expected, cause = {"success": 0, "failure": FATAL_CODE, "terminate": 143}[self.plan.ending], ""
        if self.plan.ending == "success" and self.plan.finish_gap:
            self._note(f"finish {victim.node} first")
            self._finish(victim.node)
            if not self._watch_until(time.time() + self.plan.finish_gap):
                return
        self._note(f"end: {self.plan.ending}")
        now = time.time()
        self.disturbances.append(Disturbance("end", "", now, now + END))
        self._finished = min(self._finished, now)
        if self.plan.ending == "failure":
            cause = rf"rank {victim.rank}\b[\s\S]*exit code {FATAL_CODE}"
        # A node that never had a place does not learn of the end from a store that ends with the job.
        placed = {sign.owner for sign in self.job.signs()}
        for agent in self.job.agents:
            if agent.alive and agent.owner not in placed and self.plan.hosted:
                agent.expected = ()
        agents = [a for a in self.job.agents if a.alive and a.expected != ()]
        for agent in agents:
            agent.expected, agent.cause = (expected,) if agent.expected is None else agent.expected, cause
        if self.plan.ending == "success":
            for node in self.job.names:
                self._finish(node)
        elif self.plan.ending == "failure":
            self._let_exit(victim.pid, FATAL_CODE)
        else:
            for agent in agents:
                signal_process(agent.process.pid, signal.SIGTERM)
        limit = time.time() + END
        if not self._until(lambda: time.time() > limit or not any(a.alive for a in agents), _FOREVER):
            return
        exits = [
            AgentExit(a.owner, a.ended or limit, a.code, a.expected or (), _console(a), a.cause)
            for a in self.job.agents
            if a in agents or (a.asked and not a.killed)
        ]
        self.violations += invariants.endings(exits)

    def _let_exit(self, pid: int, code: int) -> None:
        """Have a worker exit with this code, which it reads as soon as the file is there."""
        whole = self.folder / f"exit-{pid}.new"
        whole.write_text(str(code))
        whole.rename(self.folder / f"exit-{pid}")

    def _finish(self, node: str) -> None:
        self._finished = min(self._finished, time.time())
        now = time.time()
        self.disturbances.append(Disturbance("finish", node, now, now))
        (self.folder / f"finish-{node}").touch()

    def _check_output(self) -> None:
        """Files and consoles of everything that ran; a full disk excuses its node."""
        excused = {self.job.names[number] for number in self.plan.small_disks}
        written: dict[str, dict[int, int]] = {agent.owner: {} for agent in self.job.agents}
        for sign in self.job.signs():
            if sign.node in excused:
                continue
            text = _text(sign)
            written[sign.owner][sign.pid] = text.count("\n")
            self.violations += invariants.log_complete(sign, text)
        for agent in self.job.agents:
            if agent.node not in excused:
                self.violations += invariants.console_complete(
                    agent.owner, _console(agent), written[agent.owner], ended=not agent.killed, at=agent.ended
                )


def _signal_all(pids: Iterable[int], number: int) -> bool:
    return sum(signal_process(pid, number) for pid in pids) > 0


def _text(sign: LifeSigns) -> str:
    try:
        return Path(sign.log).read_text(errors="replace")
    except OSError:
        return ""


def _console(agent: ChaosAgent) -> str:
    return agent.console.read_text(errors="replace")


def _tail(agent: ChaosAgent) -> str:
    lines = [line for line in _console(agent).splitlines() if line.strip() and invariants.LINE not in line]
    return " | ".join(lines[-4:])
