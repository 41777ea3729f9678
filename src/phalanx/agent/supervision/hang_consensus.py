"""Compares progress over the nodes of a round: step rates, output, exits and hangs.

*Rates.* Every node stores the step rates of its ranks once a window. The lowest-ranked node that does so
fetches and compares all of them (`core.diagnosis.stragglers`) and publishes the stragglers. With
`--straggler-policy replace` it also tells the job's leader, through the store, which hosts are slow.

*Output.* Shortly before the silence timeout of a node ends, it asks whether ranks elsewhere write output;
nodes with recent output answer, unless another node has answered first.

*Exits.* The first node on which a rank succeeds publishes that, which starts the other nodes' timeout.

*Hangs.* In a hung collective all nodes fall silent together, and the rank that blocks the others may be on
any of them. The node that notices first publishes the hang (of several, the first in the log, which is the
same for all nodes). Every node collects stacks and stores them as its report; the publisher fetches the
reports, decides over the whole world, publishes the verdict and acts on it as on a hang of its own. Every
other node acknowledges the hang at once, if it has not published it as well: one that has done neither is
frozen or cut off, and is not waited for as long as one whose ranks are late (`core.diagnosis.patience`). It
is named as silent. Reports carry times as ages, because nodes share no clock.

Everything here runs in the owner's thread, except the threads of the broadcast.
"""

from __future__ import annotations

from time import monotonic

from phalanx.agent.supervision.round_broadcast import RoundBroadcast
from phalanx.agent.supervision.stack_collection import Findings
from phalanx.core.diagnosis.patience import NODE, NODE_BUSY, is_node_awaited
from phalanx.core.diagnosis.progress import Beat, Evidence, Verdict
from phalanx.core.diagnosis.stragglers import SlowHistory, compare, slow_hosts
from phalanx.job.time_budgets import REPORTS_MARGIN, VERDICT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.spec import WorkerGroup

_FINAL_VERDICT_TIMEOUT = 1.0
MALFORMED = (KeyError, TypeError, ValueError, OverflowError)
"""Raised for a record of unexpected shape: the workers can write to the store of a static round, too."""
_MAX_FRAMES = 40  # of a stack in a report


class HangConsensus:
    """This node among those of one round; `receive` is called in the owner's thread with every message."""

    def __init__(
        self,
        group: WorkerGroup,
        number: int,
        host: str,
        post: Callable[[Callable[[], None]], None],
        receive: Callable[[dict[str, Any]], None],
        on_slow: Callable[[str, str], None] | None = None,
    ) -> None:
        """`on_slow` gets a host that is to be replaced, and why; empty: no longer."""
        self.node, self._nodes = group.group_rank or 0, group.group_world_size or 1
        self._host = host
        self._post: Callable[[Callable[[], None]], None] = lambda call: post(lambda: _call_safely(call))
        self._windows = 0
        self._last_window: dict[str, int] = {}  # of each node's rates
        self._slow_history = SlowHistory()
        self._slow_hosts: dict[str, str] = {}
        self._on_slow = on_slow
        self._case: HangCase | None = None
        self._hangs = self._verdicts = 0  # published by this node; received
        self._broadcast = RoundBroadcast(
            group.store, f"phalanx/progress/{number}/", lambda message: self._post(lambda: receive(message))
        )

    def close(self) -> None:
        """The round is over."""
        self._broadcast.close()

    # -- rates --------------------------------------------------------------------------------------

    def publish_rates(self, rates: dict[int, float], span: float) -> None:
        """Store the step rates of this node's ranks in a window of `span` seconds."""
        self._windows += 1
        value = {"window": self._windows, "host": self._host, "rates": list(rates.items())}
        self._broadcast.put(f"rates/{self.node}", value)
        names = [f"rates/{node}" for node in range(self._nodes)]

        def compare_all() -> None:
            self._broadcast.fetch(names, 0.0, lambda found: self._post(lambda: self._compare(found, span)))

        lower = names[: self.node]
        if not lower:
            compare_all()
        else:  # a lower-ranked node that stores rates compares them
            self._broadcast.fetch(lower, 0.0, lambda found: None if found else compare_all(), enough=1)

    def withdraw_rates(self) -> None:
        """No worker runs here any more; another node may have to compare."""
        if self._windows:
            self._broadcast.put(f"rates/{self.node}", {})

    def _compare(self, found: dict[str, dict[str, Any]], span: float) -> None:
        rates: dict[int, float] = {}
        hosts: dict[int, str] = {}
        for name, value in found.items():
            try:
                window, host = int(value["window"]), str(value["host"])
                measured = {int(rank): float(rate) for rank, rate in list(value["rates"])}
            except MALFORMED:
                continue
            hosts.update(dict.fromkeys(measured, host))
            if window != self._last_window.get(name):
                rates.update(measured)
            self._last_window[name] = window
        self._slow_history, stragglers = compare(self._slow_history, rates, span, hosts)
        for straggler in stragglers:
            self._broadcast.publish({"kind": "straggler", **vars(straggler)})
        if self._on_slow is not None:
            self._slow_hosts, changes = slow_hosts(self._slow_hosts, self._slow_history, rates, hosts)
            for host, why in changes.items():
                self._on_slow(host, why)

    # -- exits and output ---------------------------------------------------------------------------

    def publish_exit(self, ranks: tuple[int, ...]) -> None:
        """These ranks have succeeded; others may still run."""
        self._broadcast.publish({"kind": "exit", "ranks": ranks})

    def query_output(self) -> None:
        """Ask for output elsewhere: often only one rank of a job writes any."""
        self._broadcast.publish({"kind": "output?", "node": self.node})

    def publish_output(self, age: float) -> None:
        """Answer: a rank of this node wrote output `age` seconds ago."""
        self._broadcast.publish({"kind": "output", "age": age})

    # -- hangs --------------------------------------------------------------------------------------

    def publish_hang(self, verdict: Verdict, now: float) -> None:
        """This node has found a hang: make all nodes collect their stacks."""
        self._hangs += 1
        self._case = HangCase(now, verdict.rule)
        case = f"{self.node}-{self._hangs}"
        self._broadcast.publish(
            {"kind": "hang", "node": self.node, "case": case, "after": self._verdicts, **vars(verdict)}
        )

    def open_case(self, message: dict[str, Any], now: float) -> bool:
        """A node published a hang; returns whether it is a new one.

        If its publisher had not received the last verdict yet, it is the hang of that verdict.
        """
        if message["after"] != self._verdicts:
            return False
        name, publisher = str(message["case"]), int(message["node"])
        if self._case is None:
            self._case = HangCase(now, str(message["rule"]))
            self._broadcast.put(f"{name}/{self.node}/begun", {"begun": True})
        elif self._case.name:
            self._case.heard_of.add(publisher)
            return False
        self._case.name, self._case.publisher = name, publisher
        return True

    def proceed(self, findings: Findings, now: float, complete: bool = True) -> str:
        """The next step with this node's findings: `wait`, `conclude` (all reports are merged), or `drop`.

        `complete`: nothing more is being collected here. The report goes to the others before that.
        """
        case = self._case
        if case is None:
            return "drop"  # the verdict is known
        if case.name and not case.reported:
            case.reported = True
            self._broadcast.put(f"{case.name}/{self.node}", make_report(findings, self._host))
            if case.publisher == self.node:
                for rank, where in findings.where.items():
                    findings.where[rank] = f"{where} on {self._host}"
                self._fetch_reports(case, findings, now)
        if case.name and case.publisher != self.node:
            return "wait" if now < case.since + VERDICT else "drop"
        # Without a name our own message has not come back: the store is slow or away.
        if not complete or not (case.fetched or case.is_overdue(findings, now - case.since)):
            return "wait"
        if not case.fetched and not case.reports:
            findings.silent.append("the other nodes")
            return "conclude"
        for node in range(self._nodes):
            report = case.reports.get(f"{case.name}/{node}")
            if node != self.node and (report is None or not merge_report(findings, report)):
                findings.silent.append(f"node {node}")
        return "conclude"

    def _fetch_reports(self, case: HangCase, findings: Findings, now: float, limit: float = NODE) -> None:
        """Fetch the reports that are missing; those that are late only while they may still come."""
        names = [f"{case.name}/{node}" for node in range(self._nodes) if node != self.node]
        missing = [name for name in names if name not in case.reports]

        def arrived(found: dict[str, dict[str, Any]]) -> None:
            case.reports.update(found)
            case.fetched = len(case.reports) == len(names) or limit == NODE_BUSY
            if not case.fetched:
                begun = [f"{name}/begun" for name in missing if name not in found]
                self._broadcast.fetch(begun, 0.0, lambda some: self._post(lambda: decide(some)))

        def decide(begun: dict[str, dict[str, Any]]) -> None:
            late = any(f"{case.name}/{node}" not in case.reports for node in case.heard_of)
            case.acknowledged = bool(begun) or late
            case.fetched = case.is_overdue(findings, NODE)
            if not case.fetched:
                self._fetch_reports(case, findings, monotonic(), NODE_BUSY)

        timeout = max(0.0, case.since + limit - REPORTS_MARGIN - now)
        self._broadcast.fetch(missing, timeout, lambda found: self._post(lambda: arrived(found)))

    def publish_verdict(self, data: dict[str, Any]) -> None:
        """Close the case; publish the verdict if this node opened it."""
        case, self._case = self._case, None
        if case is not None and case.publisher in (self.node, -1):
            if case.name:
                self._broadcast.put(f"{case.name}/verdict", data)
            self._broadcast.publish({"kind": "verdict", "node": self.node, "hang": data})

    def publish_no_hang(self, age: float) -> None:
        """Close the case: ranks of the job progressed `age` seconds ago."""
        case, self._case = self._case, None
        if case is not None and case.publisher in (self.node, -1):
            self._broadcast.publish({"kind": "no hang", "node": self.node, "age": age})

    def wait_for_verdict(self) -> dict[str, Any] | None:
        """The pending verdict of another node, now that the job ends: the end may arrive before it."""
        case, self._case = self._case, None
        if case is None or case.publisher in (self.node, -1) or not self._broadcast.alive:
            return None
        import threading

        name, found = f"{case.name}/verdict", {}
        fetched = threading.Event()

        def then(values: dict[str, dict[str, Any]]) -> None:
            found.update(values)
            fetched.set()

        self._broadcast.fetch([name], _FINAL_VERDICT_TIMEOUT, then)
        fetched.wait(_FINAL_VERDICT_TIMEOUT)
        return found.get(name)

    def close_case(self, verdict: bool = False) -> None:
        """A verdict has arrived, or this node stops waiting for one."""
        self._verdicts += verdict
        self._case = None


class HangCase:
    """One hang from its first notice to the verdict, as one node sees it; `rule`: that found it."""

    def __init__(self, since: float, rule: str) -> None:
        self.since, self._rule = since, rule
        self.name = ""  # empty until its message has arrived
        self.publisher = -1
        self.reported = False
        self.reports: dict[str, dict[str, Any]] = {}
        self.fetched = False  # all of them, or as many as will come
        self.heard_of: set[int] = set()  # nodes that have published it, too
        self.acknowledged = False  # by a node whose report is missing

    def is_overdue(self, findings: Findings, waited: float) -> bool:
        """Whether reports that are missing are no longer waited for."""
        return not is_node_awaited(
            waited,
            acknowledged=self.acknowledged,
            took=findings.took,
            may_progress=self._rule == "collectives",
        )


def _call_safely(call: Callable[[], None]) -> None:
    """Run in the owner's thread, where an error caused by another node's data would end the job."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - see above; `MALFORMED` are the expected ones
        from phalanx.log import warn

        warn(f"malformed progress data from another node: {type(error).__name__}: {error}")


# ---- reports on the wire -----------------------------------------------------------------------------


def make_report(findings: Findings, host: str) -> dict[str, Any]:
    """The findings of this node, with ages instead of times."""
    now, ranks = findings.at, []
    for beat in findings.view.alive:
        seen = findings.found.get(beat.rank, Evidence(beat.rank))
        ranks.append(
            {
                "rank": beat.rank,
                "where": f"{findings.where.get(beat.rank, 'not running')} on {host}",
                "stack": list(seen.stack[:_MAX_FRAMES]),
                "stopped": seen.stopped,
                "waiting": seen.waiting,
                "beat_age": now - beat.beat_at if beat.count else None,
                "step": beat.step,
                "count": beat.count,
                "ready_age": now - beat.ready_at if beat.ready_at else None,
                "deadline_in": beat.deadline - now if beat.deadline else None,
                "section": beat.section,
                "waits": beat.waits,
                "numbers_age": now - beat.numbers_at if beat.numbers_at else None,
                "ran_age": now - beat.ran_at if beat.ran_at else None,
            }
        )
    report = {"ranks": ranks, "finished": list(findings.view.finished)}
    if findings.traces:
        from phalanx.agent.supervision.collective_traces import condense

        report["collectives"] = condense(findings.traces)
    return report


def merge_report(findings: Findings, report: dict[str, Any]) -> bool:
    """Add the report of another node; False if it is malformed."""
    now, beats, found, where = findings.at, [], {}, {}
    try:
        for one in report["ranks"]:
            rank = int(one["rank"])
            beat_at = 0.0 if one["beat_age"] is None else now - one["beat_age"]
            ready_at = 0.0 if one["ready_age"] is None else now - one["ready_age"]
            deadline = 0.0 if one["deadline_in"] is None else now + one["deadline_in"]
            step = None if one["step"] is None else int(one["step"])
            count, section = int(one["count"]), str(one["section"])
            beat = Beat(rank, beat_at, step, count, ready_at, deadline, section, bool(one.get("waits")))
            numbers_age, ran_age = one.get("numbers_age"), one.get("ran_age")
            if numbers_age is not None:
                beat = beat.replace(numbers_at=now - numbers_age)
            if ran_age is not None:
                beat = beat.replace(ran_at=now - ran_age)
            beats.append(beat)
            stack = tuple(map(str, one["stack"]))
            found[rank] = Evidence(rank, stack, bool(one["stopped"]), bool(one["waiting"]))
            where[rank] = str(one["where"])
        finished = {int(rank) for rank in report["finished"]}
    except MALFORMED:
        return False
    view = findings.view
    alive = sorted((*view.alive, *beats), key=lambda beat: beat.rank)
    findings.view = view.replace(alive=tuple(alive), finished=tuple(sorted(finished.union(view.finished))))
    findings.found.update(found)
    findings.where.update(where)
    if report.get("collectives"):
        from phalanx.agent.supervision.collective_traces import restore

        findings.traces.update(restore(report["collectives"]))
    return True
