"""The goodput of a whole job: the ledgers of its nodes, added up at the end by the node of rank 0.

    shared/<run>/goodput/<node id>   a node's ledger; now and then while it runs, and once more at its end
    shared/<run>/goodput-total       all of them added up, with the line that every node prints

Each node writes its own key and reads one: O(nodes). A node that is lost counts with the ledger that it wrote
last. Nobody waits for longer than `GOODPUT_TOTAL`, nor for a node whose key is gone; a node that has no total
in time keeps to its own figure. A node that leaves does not wait at all, unless it holds the store, and the
job ends with it.

The keys carry the number of the job, because an id can be used again; the node that adds up removes them.
"""

from __future__ import annotations

import json
import threading

from phalanx.core.ledger.goodput import GoodputTotals, read_totals
from phalanx.core.rounds.store_commands import Change, Delete, Put, Txn
from phalanx.errors import StoreError
from phalanx.job.time_budgets import GOODPUT_PART, GOODPUT_SUM, GOODPUT_TOTAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx.core.rounds.store_commands import Notice
    from phalanx.store.client import StoreClient

"""The same, while the nodes leave a job that is being stopped."""
_LONGEST = 1 << 16
_LONGEST_LINE = 1000


class NodeGoodput:
    """This node's ledger at its end; `line(totals)` puts one into words."""

    def __init__(self, totals: GoodputTotals, line: Callable[[GoodputTotals], str]) -> None:
        self.totals, self.line = totals, line


class JobGoodput:
    """The ledger of all `nodes`; `lost`: how many of them were lost, and count as last known."""

    def __init__(self, totals: GoodputTotals, line: str, nodes: int, lost: int) -> None:
        self.totals, self.line, self.nodes, self.lost = totals, line, nodes, lost


def ledgers_prefix(run_id: str) -> str:
    """Where the nodes keep their ledgers; outside of the prefix that the leader watches."""
    return f"shared/{run_id}/goodput/"


def total_key(run_id: str) -> str:
    """Where the total is."""
    return f"shared/{run_id}/goodput-total"


def encode_ledger(job: int, totals: GoodputTotals, final: bool) -> bytes:
    """A node's ledger; incidents stay with their node, because each numbers its own."""
    ledger = totals.replace(lost={}).as_dict()
    return json.dumps({"job": job, "final": final, "ledger": ledger}).encode()


def decode_ledger(value: bytes, job: int) -> tuple[GoodputTotals, bool] | None:
    """A ledger of this job, and whether it is a node's last; None for anything else."""
    found = _object(value, job)
    totals = read_totals(found.get("ledger"))
    return None if totals is None else (totals, found.get("final") is True)


def add_up(
    own: NodeGoodput, others: Mapping[str, tuple[GoodputTotals, bool]], job: int
) -> tuple[JobGoodput, bytes]:
    """The ledger of the job, and how it is published. Ranks are those that were there at the end."""
    total, lost = own.totals, 0
    for name in sorted(others):
        one, final = others[name]
        lost += not final
        total += one if final else one.replace(ranks=0)
    total = read_totals(total.as_dict()) or total  # rounded, as the other nodes have it
    line = own.line(total)
    if lost:
        line += f" ({lost} lost node{'s' * (lost > 1)} as last known)"
    value = {"job": job, "line": line, "nodes": 1 + len(others), "lost": lost, "ledger": total.as_dict()}
    return JobGoodput(total, line, 1 + len(others), lost), json.dumps(value).encode()


def decode_total(value: bytes, job: int) -> JobGoodput | None:
    """The total of this job; None for anything else."""
    found = _object(value, job)
    totals, line = read_totals(found.get("ledger")), found.get("line")
    nodes, lost = found.get("nodes"), found.get("lost")
    if totals is None or not isinstance(line, str) or type(nodes) is not int or type(lost) is not int:
        return None
    line = "".join(char if char.isprintable() else "?" for char in line[:_LONGEST_LINE])
    return JobGoodput(totals, line, nodes, lost)


class GoodputExchange:
    """One node's part at its end; called in the membership's thread, which has nothing else to do by then."""

    def __init__(self, client: StoreClient, run_id: str, node: str, job: int) -> None:
        self._client, self._run_id, self._node, self._job = client, run_id, node, job
        self._ledgers = ledgers_prefix(run_id)

    def part(self, own: NodeGoodput) -> JobGoodput | None:
        """This node goes, and the job goes on."""
        self._client.request(self._mine(own), GOODPUT_PART)
        return None

    def collect(self, own: NodeGoodput | None, nodes: str = "") -> JobGoodput | None:
        """Add up. With `nodes`, the prefix of their keys, wait for the last figures of those that are there;
        without, as in a job that is being stopped, not long, for those of all nodes that have ever given any.

        Without figures of its own, this node lets the others not wait."""
        if own is None:
            none = json.dumps({"job": self._job}).encode()
            self._client.request(Put(total_key(self._run_id), none), GOODPUT_SUM)
            return None
        others = self._wait_for_ledgers(nodes)
        found, value = add_up(own, others, self._job)
        self._client.request(
            Txn((), (Put(total_key(self._run_id), value),), (Delete(self._ledgers, prefix=True),)),
            GOODPUT_SUM,
        )
        return found

    def receive(self, own: NodeGoodput) -> JobGoodput | None:
        """Give this node's figures, and wait for the total."""
        found: list[JobGoodput | None] = []
        here = threading.Event()

        def learn(value: bytes) -> None:
            if _object(value, self._job):
                found.append(decode_total(value, self._job))
                here.set()

        def heard(notice: Notice) -> None:
            for entry, deleted in notice.changes:
                if not deleted:
                    learn(entry.value)

        watch, reply = self._client.watch(total_key(self._run_id), heard, timeout=GOODPUT_SUM)
        try:
            for entry in reply.entries:
                learn(entry.value)
            self._client.request(self._mine(own), GOODPUT_SUM)
            here.wait(GOODPUT_TOTAL)
            return found[-1] if found else None
        finally:
            self._client.unwatch(watch)

    def _mine(self, own: NodeGoodput) -> Put:
        return Put(self._ledgers + self._node, encode_ledger(self._job, own.totals, final=True))

    def _wait_for_ledgers(self, nodes: str) -> dict[str, tuple[GoodputTotals, bool]]:
        others: dict[str, tuple[GoodputTotals, bool]] = {}
        here: set[str] = set()
        changed = threading.Condition()
        seen: dict[str, int] = {}  # revisions: news may overtake what the watch found when it began

        def news(changes: tuple[Change, ...]) -> list[Change]:
            new = [one for one in changes if one.entry.mod >= seen.get(one.entry.key, 0)]
            seen.update({one.entry.key: one.entry.mod for one in new})
            return new

        def heard_ledger(changes: tuple[Change, ...]) -> None:
            with changed:
                for entry, deleted in news(changes):
                    node = entry.key.removeprefix(self._ledgers)
                    ledger = None if deleted else decode_ledger(entry.value, self._job)
                    if ledger is not None and node != self._node:
                        others[node] = ledger
                changed.notify()

        def heard_node(changes: tuple[Change, ...]) -> None:
            with changed:
                for entry, deleted in news(changes):
                    (here.discard if deleted else here.add)(entry.key.removeprefix(nodes))
                changed.notify()

        def complete() -> bool:
            awaited = here if nodes else set(others)
            return all(node in others and others[node][1] for node in awaited - {self._node})

        watches = []
        try:
            for prefix, heard in ((self._ledgers, heard_ledger), (nodes, heard_node))[: 2 if nodes else 1]:
                number, reply = self._client.watch(
                    prefix,
                    lambda notice, heard=heard: heard(notice.changes),  # type: ignore[misc]  # of this turn
                    prefix=True,
                    timeout=GOODPUT_SUM,
                )
                watches.append(number)
                heard(tuple(Change(entry) for entry in reply.entries))
            with changed:
                changed.wait_for(complete, GOODPUT_SUM if nodes else GOODPUT_PART)
                return dict(others)
        finally:
            for number in watches:
                self._client.unwatch(number)


def exchange(call: Callable[[], JobGoodput | None]) -> JobGoodput | None:
    """Without a store that answers, there is no total."""
    try:
        return call()
    except StoreError:
        return None


def next_report(began: float, now: float) -> float:
    """When a running node writes its ledger again: after a minute, then after a tenth of its time."""
    return now + max(60.0, 0.1 * (now - began))


def _object(value: bytes, job: int) -> dict[str, Any]:
    if len(value) > _LONGEST:
        return {}
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("job") == job else {}
