"""What can be asked of an agent: through its socket by its user, and by the other nodes through their store.

| request | answer |
|---|---|
| `{}` or `{"ask": "status"}` | the node, as `observe.snapshot` has it; `"gpus": true`: with its devices |
| `{"ask": "stacks", "ranks": [0, 3]}` | `{"stacks": [...]}`: the Python stack of these ranks now, or of all |
| `{"ask": "read_logs", "ranks": [0, 3], "places": {...}}` | `{"logs": …}`: what is new in them |
| `{"ask": "quarantine"}` | `{"quarantine": [...]}`: the hosts that are kept out, why and for how long |
| `{"do": "quarantine", "hosts": [...], "reason": "...", "seconds": 60}` | they are; not, with `remove` |
| `{"ask": "dashboard"}` | `{"link": "..."}`: the page of the job, with its token; only on this machine |
| `{"do": "restart"}`, `{"do": "stop"}`, `{"do": "drain"}` | `{"done": "..."}`, once it has been begun |

With `"all": true` the request goes to every node of the job: the answers of the others come in `peers`, and
those that did not answer in time are counted in `silent`. An answer with `error` says why there is none.

All of it runs in the owner's thread and none of it waits; the time that an answer takes is spent in the loop.
"""

from __future__ import annotations

import os
import signal

from phalanx.core.group.events import RestartRequested, Signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from msgspec import Raw

    from phalanx.agent.agent import Agent
    from phalanx.agent.gpu_probe import Figures, GpuProbe
    from phalanx.agent.node_view import NodeView
    from phalanx.agent.supervision.stack_collection import StackDump
    from phalanx.core.group.group import Phase
    from phalanx.observe.log_layout import WholeLog
    from phalanx.web.dashboard_process import DashboardProcess

    Answer = Callable[[dict[str, Any]], None]

_PATIENCE = 3.0  # seconds for the other nodes
_FRAMES = 60
_MOST_HOSTS, _LONGEST_HOST, _LONGEST_TIME = 64, 256, 1e9  # of one request


class RequestDesk:
    """Answers the requests to one agent."""

    def __init__(self, agent: Agent, view: NodeView, dashboard: DashboardProcess | None) -> None:
        self._agent, self._view, self._dashboard = agent, view, dashboard
        self._dumps: list[tuple[StackDump, Answer]] = []
        self._known_logs: dict[str, WholeLog] = {}
        self.probe: GpuProbe | None = None
        """Of the devices, once somebody has asked for them."""

    def handle(self, request: dict[str, Any], answer: Answer) -> None:
        """Answer a request of this machine."""
        if request.get("ask") == "dashboard":  # a secret: not for the other nodes
            from phalanx.web.dashboard_process import describe

            answer(describe(self._dashboard))
        elif request.get("all") is True:
            self._ask_everyone({key: value for key, value in request.items() if key != "all"}, answer)
        else:
            self.answer(request, answer)

    def answer(self, request: dict[str, Any], answer: Answer) -> None:
        """Answer for this node alone; also what another node asked.

        One for another `node`, or that is `not` for this one, has an empty answer."""
        wanted, others = request.get("node"), request.get("not")
        if wanted is not None or isinstance(others, list):
            own = self._agent.nodes.place().get("id", "")
            if (wanted is not None and wanted != own) or (isinstance(others, list) and own in others):
                answer({})
                return
        match request.get("ask", "" if "do" in request else "status"), request.get("do"):
            case "status", _:
                self._status(request, answer)
            case "stacks", _:
                self._stacks(_numbers(request.get("ranks")), answer)
            case "read_logs", _:
                from phalanx.agent.log_reader import read_logs

                answer({"logs": read_logs(self._agent, request, self._known_logs)})
            case "quarantine", _:
                answer({"quarantine": self._agent.nodes.place().get("quarantine", [])})
            case _, "quarantine":
                self._quarantine(request, answer)
            case _, ("restart" | "stop" | "drain") as what:
                refusal = self._refusal(what)
                answer({"error": refusal} if refusal else {"done": self._do(what)})
            case _:
                answer({"error": "unknown request"})

    def _ask_everyone(self, request: dict[str, Any], answer: Answer) -> None:
        """First the others: a stop here must not come before they know of theirs."""

        def then(peers: list[Raw], silent: int) -> None:
            self.answer(request, lambda told: answer({**told, "peers": peers, "silent": silent}))

        self._agent.nodes.ask(request, _PATIENCE, then)
        if request.get("gpus") is True:
            self._ask_devices(lambda _figures: None)  # meanwhile

    # -- the node ---------------------------------------------------------------------------------------

    def _status(self, request: dict[str, Any], answer: Answer) -> None:
        from phalanx.observe.snapshot import as_json

        if request.get("gpus") is True:
            self._ask_devices(lambda figures: answer(as_json(self._view.snapshot(figures))))
        else:
            answer(as_json(self._view.snapshot()))

    def _ask_devices(self, then: Callable[[Figures], None]) -> None:
        from time import monotonic

        if self.probe is None:
            from phalanx.agent.gpu_probe import GpuProbe

            self.probe = GpuProbe()
        self.probe.ask(monotonic(), then)

    # -- stacks -------------------------------------------------------------------------------------

    def _stacks(self, ranks: set[int] | None, answer: Answer) -> None:
        from time import monotonic

        from phalanx.agent.supervision.stack_collection import StackDump

        agent = self._agent
        context, boards = agent.context, agent.supervision.current_boards
        if context is None or boards is None or not context.running:
            answer({"stacks": []})
            return
        local = {
            w.local_rank for w in agent.get_worker_group().workers if ranks is None or w.global_rank in ranks
        }
        self._dumps.append((StackDump(context, boards, monotonic(), local), answer))

    def _collect(self, dump: StackDump) -> list[dict[str, Any]]:
        from phalanx.agent.supervision import stacks

        found = []
        for worker in self._agent.get_worker_group().workers:
            if worker.local_rank in dump.pids:
                threads = stacks.parse(dump.text(worker.local_rank))
                found.append(
                    {
                        "rank": worker.global_rank,
                        "pid": dump.pids[worker.local_rank],
                        "host": self._agent.host,
                        "stopped": worker.local_rank in dump.stopped,
                        "stack": list(threads[0][:_FRAMES]) if threads else [],
                        "threads": len(threads),
                    }
                )
        return found

    # -- deeds --------------------------------------------------------------------------------------

    def _refusal(self, what: str) -> str:
        """Why this node cannot do it; empty if it can."""
        current = self._agent.state.round
        others = current is not None and len(current.members) > 1
        if what == "drain" and others and self._agent.nodes.place().get("holds_store"):
            return (
                f"{self._agent.host} holds the job's store, and the job would end with it: stop the job, or "
                "run the store by itself next time (phalanx store)"
            )
        return ""

    def _do(self, what: str) -> str:
        agent = self._agent
        if what == "restart":
            agent.post(RestartRequested(f"a restart was asked for (uid {os.geteuid()})"))
            return "the workers are being restarted"
        if what == "drain":
            return agent.nodes.drain()
        agent.post(Signal(signal.SIGTERM))
        return "the job is being stopped"

    def _quarantine(self, request: dict[str, Any], answer: Answer) -> None:
        """Write it for all nodes: the leader and the others learn it from the store."""
        from phalanx.core.rounds.records import UNTIL_REMOVED, HostRecord

        hosts, reason, seconds = request.get("hosts"), request.get("reason"), request.get("seconds")
        valid = isinstance(hosts, list) and all(
            isinstance(one, str) and 0 < len(one) <= _LONGEST_HOST for one in hosts
        )
        if not hosts or not valid or len(hosts) > _MOST_HOSTS:
            answer({"error": "name the hosts"})
            return
        left = UNTIL_REMOVED
        if isinstance(seconds, int | float) and 0 < seconds < _LONGEST_TIME:
            left = float(seconds)
        why = reason[:_LONGEST_HOST] if isinstance(reason, str) and reason else "by hand"
        removed = request.get("remove") is True
        records = {host: None if removed else HostRecord(why, left) for host in hosts}
        names = " ".join(hosts)

        def then(done: bool) -> None:
            if not done:
                answer({"error": "not done: the job has one node only, or its store is away"})
            elif removed:
                answer({"done": f"{names} may take part again"})
            else:
                answer({"done": f"{names} is quarantined: {why}"})

        self._agent.nodes.change_hosts(records, then)

    # -- a part of the loop -------------------------------------------------------------------------

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        return [] if self.probe is None else self.probe.fds(phase)

    def deadline(self, phase: Phase) -> float | None:
        probed = None if self.probe is None else self.probe.deadline(phase)
        if not self._dumps:
            return probed
        from time import monotonic

        from phalanx.agent.supervision.stack_collection import RECHECK

        again = monotonic() + RECHECK
        return again if probed is None else min(again, probed)

    def close(self) -> None:
        """End what runs for an answer."""
        if self.probe is not None:
            self.probe.close()

    def look(self, phase: Phase, now: float) -> None:
        """Answer those whose stacks have arrived."""
        if self.probe is not None:
            self.probe.look(phase, now)
        if not self._dumps:
            return
        ready = [one for one in self._dumps if one[0].answered(now)]
        self._dumps = [one for one in self._dumps if one not in ready]
        for dump, answer in ready:
            answer({"stacks": self._collect(dump)})


def _numbers(value: object) -> set[int] | None:
    """Ranks of a request; None: all."""
    if not isinstance(value, list):
        return None
    return {one for one in value if type(one) is int}
