"""Golden scripts: a text file of commands, and after each command the full trace it must give.

    > options min=2 max=3      any field of core.rounds.Options, before the first node; quarantine=3:60:30
    > join node-a node-b       start agents (`node-a@2` is host node-a's second agent; rank=1 position=3)
    > run 2.5                  let time pass
    > kill | host | fail | succeed | leave | drain NODE…
    > sleep | cut | cut-up | cut-down SECONDS NODE…
    > store SECONDS            kill the store for that long
    > keep                     what the journal holds for certain; `store SECONDS back` goes back to it
    > break SECONDS NODE…      its connection ends and it gets no new one for that long
    > refuse SECONDS NODE…     as break, by a firewall: the store does not learn of it
    > preempt NODE…            it leaves when all workers have saved
    > unfit NODE…              it cannot start its workers
    > put KEY VALUE            another program writes a record; `erase KEY`, or deletes one
    > close REASON

The network takes exactly 1 ms each way, stopping workers 100 ms. PHALANX_GOLDEN=write writes the
traces anew: read the difference before believing it.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.rounds.leader_view import Options
from phalanx.core.rounds.quarantine import QuarantinePolicy
from tests.simulation.simulator import Simulation

_FIELDS = {"min": "min_nodes", "max": "max_nodes", "restarts": "max_restarts", "fixed": "fixed"}


class Script:
    """Plays one file."""

    def __init__(self) -> None:
        self.options = Options(max_nodes=2, prefix="job/")
        self.sim: Simulation | None = None

    def play(self, text: str) -> str:
        """The file with the traces that its commands gave."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("#") or not line.strip():
                lines.append(line)
            elif line.startswith("> "):
                lines.append(line)
                lines += self._command(*line[2:].split())
        return "\n".join(lines) + "\n"

    def _command(self, verb: str, *words: str) -> list[str]:
        if verb == "options":
            for word in words:
                name, value = word.split("=")
                if name == "quarantine":  # failures:window:cooldown
                    failures, window, cooldown = value.split(":")
                    policy = QuarantinePolicy(int(failures), float(window), float(cooldown))
                    self.options = replace(self.options, quarantine=policy)
                    continue
                number = float(value) if "." in value or value == "inf" else int(value)
                self.options = replace(self.options, **{_FIELDS.get(name, name): number})
            return []
        if self.sim is None:
            self.sim = Simulation(1, self.options, latency=(0.001, 0.001))
            self.sim.tracing = True
        self._do(self.sim, verb, list(words))
        trace, self.sim.trace = self.sim.trace, []
        return trace

    def _do(self, sim: Simulation, verb: str, words: list[str]) -> None:
        if verb == "run":
            sim.run(sim.now + float(words[0]))
        elif verb == "join":
            info = {k: int(v) for k, v in (w.split("=") for w in words if "=" in w)}
            for word in (w for w in words if "=" not in w):
                sim.join(word.partition("@")[0], node_id=word, **info)
        elif verb == "store":
            sim.stop_store(float(words[0]), back=words[1:] == ["back"])
        elif verb == "keep":
            sim.keep()
        elif verb == "put":
            sim.put(f"job/{words[0]}", " ".join(words[1:]).encode())
        elif verb == "erase":
            sim.delete(f"job/{words[0]}")
        elif verb == "close":
            sim.put(
                f"job/close/{max(a.participant.job for a in sim.agents.values())}", " ".join(words).encode()
            )
        elif verb in ("sleep", "cut", "cut-up", "cut-down", "break", "refuse"):
            for agent in (sim.agents[w] for w in words[1:]):
                seconds = float(words[0])
                if verb == "sleep":
                    sim.sleep(agent, seconds)
                elif verb == "refuse":
                    sim.refuse(agent, seconds, told=False)
                elif verb == "break":
                    agent.locked_out = sim.now + seconds
                    sim.break_connection(agent)
                else:
                    sim.cut(agent, seconds, up=verb != "cut-down", down=verb != "cut-up")
        else:
            for agent in (sim.agents[w] for w in words):
                match verb:
                    case "kill":
                        sim.crash(agent)
                    case "host":
                        sim.crash(agent, host=True)
                    case "fail":
                        sim.end_workers(agent, False, "exit code 1")
                    case "succeed":
                        sim.end_workers(agent, True)
                    case "leave":
                        sim.leave(agent, "SIGTERM")
                    case "preempt":
                        sim.leave(agent, "SIGUSR1", preempted=True)
                    case "unfit":
                        sim.unfit(agent, "no such program")
                    case "drain":
                        sim.put(f"job/drain/{agent.id}", b"")
                    case _:
                        raise ValueError(f"{verb}: not a command of a golden script")
