"""The agent among other nodes: what its membership tells becomes events, what the agent decides is told it.

Happenings come from the membership's thread, in order, and only post; everything else here is called by the
agent's own thread. The job's count of restarts is the leader's: it travels with the round, and the group
takes it over.
"""

from __future__ import annotations

import time

from phalanx.core import group_events as say
from phalanx.core.group_events import Outcome
from phalanx.core.round_records import CLOSED
from phalanx.core.rounds import LOST
from phalanx.membership.elastic import error_of
from phalanx.membership.membership import clock
from phalanx.membership.membership_events import FAILED, Ended, Formed, NodeFailure, Over, Remark, Waiting
from phalanx.membership.peers import for_all_screens
from phalanx.observe.progress_line import Progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.agent import SimpleElasticAgent
    from phalanx.agent.spec import RunResult
    from phalanx.core.group import Ending
    from phalanx.core.round_records import Round
    from phalanx.errors import RendezvousError
    from phalanx.membership.elastic import ElasticInfo, ElasticRendezvous
    from phalanx.membership.membership_events import Happening

_LAST_WORD = 5.0  # for the others to hear how it ended here


class Cluster:
    """The bridge between one agent and its membership."""

    meets = True

    def __init__(self, agent: SimpleElasticAgent, handler: ElasticRendezvous, timeout: float) -> None:
        spec, policy = agent.get_worker_group().spec, agent.restart_policy
        # With a window it is the nodes that know when the failures were; the leader then only counts them.
        limit = policy.max_restarts if policy.window is None else None
        self._handler, self._post, self._show = handler, agent._post, agent.show_waiting
        self._note = agent._note
        self._timeout = timeout
        self._membership = handler.attach(
            self._hear, agent.open_meeting, slots=spec.local_world_size, role=spec.role, max_restarts=limit
        )
        self.name = handler.settings.name  # of this node, as the others know it
        self._began = time.time()
        self._formed: Formed | None = None
        self._finished = 0  # the round whose workers have succeeded here
        self.failure: NodeFailure | None = None  # what ended the job, the same on every node
        self.error: RendezvousError | None = None  # what ended it here, where no worker did

    @property
    def waiting(self) -> str:
        """What the nodes wait for, in the leader's words."""
        return self._membership.line.words(clock())

    @property
    def job_failure(self) -> tuple[str, int] | None:
        """The report and the exit code, once the job has failed."""
        told = self.failure
        return None if told is None else (told.report or told.summary, told.exit_code)

    # What the agent tells

    def join(self, gone: int | None, attempt: int) -> None:
        """Be in the next round; `gone` is the one before, if nothing of it is alive."""
        if not self._membership.started:
            self._membership.start()
        elif gone is not None:
            self._membership.workers_gone(gone)

    def workers_gone(self, number: int) -> None:
        """Nothing of this round is alive on this node."""
        self._membership.workers_gone(number)

    def take(self, number: int) -> ElasticInfo:
        """The round that is to be started, and with it what serves its workers."""
        formed, self._formed = self._formed, None
        assert formed is not None, "a round is told before it is started"
        assert formed.round.number == number, "no round follows before the workers of the last are gone"
        return self._handler.info(formed)

    def failed(self, command: say.ReportFailure, result: RunResult, name: str, story: str) -> None:
        """Tell the others at once, with the report that all nodes will show should this end the job."""
        report, code = for_all_screens(result, name, self._began, story or command.summary)
        final = command.summary if command.final else ""
        self._membership.failed(command.round, NodeFailure(command.summary, final, report, code))

    def finished(self, number: int) -> None:
        """Wait for the other nodes: their end is told as BarrierDone."""
        self._finished = number
        self._membership.finished(number, self._timeout)

    def ending(self, ending: Ending) -> None:
        """The agent stops its workers for good; the others need not wait for that to know it."""
        if ending.outcome in (Outcome.SIGNALED, Outcome.LEFT):
            self._membership.leave(ending.message)

    def leave(self, number: int, reason: str) -> None:
        """Nothing is alive here: go, and let the others go on."""
        if self._membership.started and not self._membership.ended.is_set():
            self._membership.leave(reason)
            self._membership.workers_gone(number)
            self._membership.ended.wait(_LAST_WORD)
        self.give_back()

    def close(self, number: int, command: say.CloseRendezvous) -> None:
        """The job is over. That is the leader's to declare; here we wait until it has."""
        if not command.job_failed:
            self.leave(number, command.reason)
            return
        if self._membership.started and not self._membership.ended.is_set():
            self._membership.workers_gone(number)
            self._membership.ended.wait(_LAST_WORD)
        self.leave(number, command.reason)

    def give_back(self) -> None:
        """Close what is open; idempotent."""
        self._membership.release()
        formed, self._formed = self._formed, None
        if formed is not None and formed.served is not None:
            formed.served.close()

    # What the membership tells, from its own thread

    def _hear(self, happening: Happening) -> None:
        match happening:
            case Formed(current, place):
                self._formed = happening
                names = current.all_names()
                ready = say.GroupRound(
                    current.number, names, place.rank, attempt=current.restarts, counted=True
                )
                self._post(say.RoundReady(ready))
            case Over():
                self._post(self._end_of_round(happening))
            case Ended():
                self._post(self._end_of_job(happening))
            case Waiting(text):
                self._show(text)
            case Remark(text):
                self._post(lambda: self._note(text))

    def _end_of_round(self, over: Over) -> say.Event:
        now, number = over.now, over.was.number
        if over.drained:
            return say.RoundFailed("graceful", over.reason)
        if over.at_once or now is None:
            return say.RoundOver(number, over.reason, over.at_once)
        failed = self._failure_of(number, now, now.outcome)
        if failed is not None:
            return failed
        if now.phase == CLOSED:
            return say.RoundFailed("closed", over.reason, job_failed=False)
        if now.restarts > over.was.restarts:
            summary = NodeFailure.read(now.cause[2]).summary
            return say.PeerFailed(now.cause[1], number, now.restarts, summary)
        return say.RoundOver(number, over.reason)

    def _failure_of(self, number: int, now: Round, outcome: str) -> say.Event | None:
        """A failure, of any node, that has ended the job: `final` beats whatever budget is left."""
        failure, name = NodeFailure.read(now.cause[2]), now.cause[1]
        if outcome == "closed" and now.reason.startswith(FAILED):
            name, _, summary = now.reason.removeprefix(FAILED).partition(": ")
            failure = NodeFailure(summary, final=summary)
        if outcome != "failed" and not failure.final:
            return None
        self.failure = failure
        return say.PeerFailed(name, number, now.restarts, failure.summary, final=True)

    def _end_of_job(self, ended: Ended) -> say.Event:
        outcome, reason, current = ended.end
        number = ended.was.number if ended.was is not None else -1
        if current is not None and outcome in ("failed", "closed"):
            failed = self._failure_of(max(number, 0), current, outcome)
            if failed is not None:
                return failed
        if self._finished == number:  # whatever it was, it cannot fail workers that have succeeded
            if outcome in ("succeeded", "closed"):
                lost = reason.partition(LOST)[2]
                return say.BarrierDone(not lost, (f"{lost} ({LOST[:-2]})",) if lost else (), number)
            return say.BarrierDone(False, () if outcome == "left" else (f"the store ({reason})",), number)
        error = error_of(ended, self._handler.settings)
        if outcome in ("succeeded", "closed"):
            return say.RoundFailed("closed", str(error), job_failed=False)
        if outcome == "left":
            return say.RoundFailed("graceful", reason)
        self.error = error
        return say.RoundFailed("timeout" if outcome == "timeout" else "error", str(error))


class CountdownLine(Progress):
    """A progress line whose words may have figures in them that move; that is no new wait."""

    def limit(self, what: str, now: float, timeout: float | None) -> float | None:
        if _without_figures(what) == _without_figures(self._what):
            self._what = what
        return super().limit(what, now, timeout)


def _without_figures(text: str) -> str:
    return "".join(char for char in text if not char.isdigit())
