"""The other nodes of a round, for whoever watches the progress of this one: rates, exits and hangs compared.

*Rates.* Every node keeps the step rates of its ranks in the bulletin once a window. The lowest node that does
so fetches all of them, compares (`core.pace`), and tells who is slow.

*Output.* A node on which nobody writes asks, shortly before its patience ends, whether somebody does
elsewhere; those that can say so answer, unless they heard another answer first.

*Exits.* The first node on which a rank ends well tells it, so that the others' time begins to run.

*Hangs.* In a hung collective all nodes fall silent together, and the one that holds the others up may be
anywhere. So the node that notices first tells it (of several, the one whose news is first in the log: all see
the same order). Everybody collects stacks and keeps them as a testimony; the one who told fetches them, sums
up over the whole world, tells the verdict, and acts on it as if the hang were its own. A node that does not
answer in time is named as silent, and does not hold up the rest. The testimonies carry times as ages, because
nodes have no clock in common.

Everything here runs in the owner's thread, but for the bulletin's own.
"""

from __future__ import annotations

from phalanx.core.progress import Beat, Evidence, Verdict
from phalanx.core.stragglers import Standing, compare
from phalanx.supervision.round_broadcast import RoundBroadcast, can_carry
from phalanx.supervision.stack_collection import Findings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.spec import WorkerGroup

PATIENCE = 0.9
"""Seconds from a verdict until the answers of the other nodes are to be there."""
_GIVE_UP = 10.0
"""For the verdict of another node, before we look for ourselves again."""
_LAST_WORD = 1.0
NOT_OURS = (KeyError, TypeError, ValueError, OverflowError)
"""What a record that is none of ours makes one raise: the store of a static round is open to workers, too."""
_FRAMES = 40
"""Of a stack, as it travels."""


class HangConsensus:
    """This node among those of one round; `hear` is called in the owner's thread with the others' news."""

    def __init__(
        self,
        group: WorkerGroup,
        number: int,
        host: str,
        post: Callable[[Callable[[], None]], None],
        hear: Callable[[dict[str, Any]], None],
    ) -> None:
        self.node, self._nodes = group.group_rank or 0, group.group_world_size or 1
        self._host = host
        self._post: Callable[[Callable[[], None]], None] = lambda errand: post(lambda: _carry_out(errand))
        self._windows = 0
        self._seen: dict[str, int] = {}  # the window of each node's last rates
        self._standing = Standing()
        self._inquiry: Inquiry | None = None
        self._hangs = self._verdicts = 0  # told by us; heard
        self._bulletin = RoundBroadcast(
            group.store, f"phalanx/progress/{number}/", lambda news: self._post(lambda: hear(news))
        )

    def close(self) -> None:
        """The round is over."""
        self._bulletin.close()

    # -- rates --------------------------------------------------------------------------------------

    def rates(self, rates: dict[int, float], span: float) -> None:
        """What this node's ranks made in a window."""
        self._windows += 1
        mine = {"window": self._windows, "host": self._host, "rates": list(rates.items())}
        self._bulletin.keep(f"pace/{self.node}", mine)
        names = [f"pace/{node}" for node in range(self._nodes)]

        def compare_all() -> None:
            self._bulletin.fetch(names, 0.0, lambda found: self._post(lambda: self._compare(found, span)))

        lower = names[: self.node]
        if not lower:
            compare_all()
        else:  # somebody below us who keeps rates does it
            self._bulletin.fetch(lower, 0.0, lambda found: None if found else compare_all(), enough=1)

    def no_rates(self) -> None:
        """Nothing runs here any more; somebody else may have to compare."""
        if self._windows:
            self._bulletin.keep(f"pace/{self.node}", {})

    def _compare(self, found: dict[str, dict[str, Any]], span: float) -> None:
        rates: dict[int, float] = {}
        hosts: dict[int, str] = {}
        for name, one in found.items():
            try:
                window, host, measured = int(one["window"]), str(one["host"]), list(one["rates"])
                news = {int(rank): float(rate) for rank, rate in measured}
            except NOT_OURS:
                continue
            hosts.update(dict.fromkeys(news, host))
            if window != self._seen.get(name):
                rates.update(news)
            self._seen[name] = window
        self._standing, slow = compare(self._standing, rates, span, hosts)
        for straggler in slow:
            self._bulletin.tell({"kind": "slow", **vars(straggler)})

    # -- exits --------------------------------------------------------------------------------------

    def exited(self, ranks: tuple[int, ...]) -> None:
        """These have ended well, while others may run on."""
        self._bulletin.tell({"kind": "exit", "ranks": ranks})

    # -- output -------------------------------------------------------------------------------------

    def ask_for_output(self) -> None:
        """Nothing was written here for long: where many ranks are silent by habit, one may still talk."""
        self._bulletin.tell({"kind": "quiet", "node": self.node})

    def tell_of_output(self, age: float) -> None:
        """Somebody asked, and here something was written that long ago."""
        self._bulletin.tell({"kind": "output", "age": age})

    # -- hangs --------------------------------------------------------------------------------------

    def suspect(self, verdict: Verdict, now: float) -> None:
        """Something hangs here: let all nodes look."""
        self._hangs += 1
        self._inquiry = Inquiry(now)
        case = f"{self.node}-{self._hangs}"
        news = {"kind": "hang", "node": self.node, "case": case, "after": self._verdicts, **vars(verdict)}
        self._bulletin.tell(news)

    def opened(self, news: dict[str, Any], now: float) -> bool:
        """A hang was told, here or elsewhere; whether it is the first word of it.

        It is not, when its author had not heard the last verdict yet: then it is the hang of that verdict.
        """
        if news["after"] != self._verdicts:
            return False
        case, author = str(news["case"]), int(news["node"])
        if self._inquiry is None:
            self._inquiry = Inquiry(now)
        elif self._inquiry.case:
            return False
        self._inquiry.case, self._inquiry.author = case, author
        return True

    def proceed(self, findings: Findings, now: float, complete: bool = True) -> str:
        """What to do with what was found here: `wait`, `conclude` (then all of it is here), or `drop` it.

        `complete`: nothing more is being collected here. Others hear of what there is before that.
        """
        inquiry = self._inquiry
        if inquiry is None:
            return "drop"  # the verdict is known
        if not inquiry.case:  # our own news has not come back: the store is slow, or away
            return self._alone(findings, inquiry, now) if complete else "wait"
        if not inquiry.testified:
            inquiry.testified = True
            self._testify(inquiry, findings, now)
        if inquiry.author != self.node:
            return "wait" if now < inquiry.since + _GIVE_UP else "drop"
        if not complete:
            return "wait"
        if inquiry.answers is None:
            return self._alone(findings, inquiry, now)
        for node in range(self._nodes):
            answer = inquiry.answers.get(f"{inquiry.case}/{node}")
            if node != self.node and (answer is None or not add_testimony(findings, answer)):
                findings.silent.append(f"node {node}")
        return "conclude"

    @staticmethod
    def _alone(findings: Findings, inquiry: Inquiry, now: float) -> str:
        if now < inquiry.since + PATIENCE:
            return "wait"
        findings.silent.append("the other nodes")
        return "conclude"

    def _testify(self, inquiry: Inquiry, findings: Findings, now: float) -> None:
        mine = testimony(findings, self._host)
        self._bulletin.keep(f"{inquiry.case}/{self.node}", mine)
        if inquiry.author != self.node:
            return
        for rank, where in findings.where.items():
            findings.where[rank] = f"{where} on {self._host}"
        others = [f"{inquiry.case}/{node}" for node in range(self._nodes) if node != self.node]

        def arrived(answers: dict[str, dict[str, Any]]) -> None:
            inquiry.answers = answers

        left = inquiry.since + PATIENCE - now - 0.05  # to be here before we conclude without them
        self._bulletin.fetch(others, max(0.0, left), lambda found: self._post(lambda: arrived(found)))

    def concluded(self, data: dict[str, Any]) -> None:
        """Tell the verdict, if the inquiry was ours; it is over in any case."""
        inquiry, self._inquiry = self._inquiry, None
        if inquiry is not None and inquiry.author in (self.node, -1):
            if inquiry.case:
                self._bulletin.keep(f"{inquiry.case}/verdict", data)
            self._bulletin.tell({"kind": "verdict", "node": self.node, "hang": data})

    def last_word(self) -> dict[str, Any] | None:
        """The verdict that we still wait for, now that the job ends over it: the end may be told first."""
        inquiry, self._inquiry = self._inquiry, None
        if inquiry is None or inquiry.author in (self.node, -1) or not self._bulletin.alive:
            return None
        import threading

        name, found = f"{inquiry.case}/verdict", {}
        fetched = threading.Event()

        def then(what: dict[str, dict[str, Any]]) -> None:
            found.update(what)
            fetched.set()

        self._bulletin.fetch([name], _LAST_WORD, then)
        fetched.wait(_LAST_WORD)
        return found.get(name)

    def settled(self, verdict: bool = False) -> None:
        """The verdict has been heard, or is not waited for any longer."""
        self._verdicts += verdict
        self._inquiry = None


class Inquiry:
    """A hang from its first word to the verdict, as one node sees it."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.case = ""  # not known to all yet
        self.author = -1
        self.testified = False
        self.answers: dict[str, dict[str, Any]] | None = None


def _carry_out(errand: Callable[[], None]) -> None:
    """In the owner's thread, where an error would end the job: what other nodes say must not be able to."""
    try:
        errand()
    except Exception as error:  # noqa: BLE001 - see above; `NOT_OURS` is what is known to happen
        from phalanx.log import warn

        warn(f"what the other nodes say about their progress makes no sense: {type(error).__name__}: {error}")


def consensus_of(
    group: WorkerGroup,
    number: int,
    host: str,
    post: Callable[[Callable[[], None]], None],
    hear: Callable[[dict[str, Any]], None],
) -> HangConsensus | None:
    """None where there is no way to talk beside the rendezvous."""
    return HangConsensus(group, number, host, post, hear) if can_carry(group.store) else None


# ---- testimonies as they travel ----------------------------------------------------------------------


def testimony(findings: Findings, host: str) -> dict[str, Any]:
    """What this node found, with ages instead of times."""
    now, ranks = findings.at, []
    for beat in findings.view.alive:
        seen = findings.found.get(beat.rank, Evidence(beat.rank))
        ranks.append(
            {
                "rank": beat.rank,
                "where": f"{findings.where.get(beat.rank, 'not running')} on {host}",
                "stack": list(seen.stack[:_FRAMES]),
                "stopped": seen.stopped,
                "waiting": seen.waiting,
                "quiet": now - beat.beat_at if beat.count else None,
                "step": beat.step,
                "count": beat.count,
                "ready": now - beat.ready_at if beat.ready_at else None,
                "left": beat.deadline - now if beat.deadline else None,
                "section": beat.section,
            }
        )
    return {"ranks": ranks, "finished": list(findings.view.finished)}


def add_testimony(findings: Findings, answer: dict[str, Any]) -> bool:
    """Add what another node found; False when that makes no sense."""
    now, beats, found, where = findings.at, [], {}, {}
    try:
        for one in answer["ranks"]:
            rank = int(one["rank"])
            beat_at = 0.0 if one["quiet"] is None else now - one["quiet"]
            ready_at = 0.0 if one["ready"] is None else now - one["ready"]
            deadline = 0.0 if one["left"] is None else now + one["left"]
            step = None if one["step"] is None else int(one["step"])
            count, section = int(one["count"]), str(one["section"])
            beats.append(Beat(rank, beat_at, step, count, ready_at, deadline, section))
            stack = tuple(map(str, one["stack"]))
            found[rank] = Evidence(rank, stack, bool(one["stopped"]), bool(one["waiting"]))
            where[rank] = str(one["where"])
        finished = {int(rank) for rank in answer["finished"]}
    except NOT_OURS:
        return False
    view = findings.view
    alive = sorted((*view.alive, *beats), key=lambda beat: beat.rank)
    findings.view = view.replace(alive=tuple(alive), finished=tuple(sorted(finished.union(view.finished))))
    findings.found.update(found)
    findings.where.update(where)
    return True
