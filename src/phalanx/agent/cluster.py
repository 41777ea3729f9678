"""The agent among other nodes: what its membership tells becomes events, what the agent decides is told to it.

Happenings come from the membership's thread, in order, and only post; everything else here is called by the agent's
own thread. The job's count of restarts is the leader's: it travels with the round, and the group takes it over.
"""

from __future__ import annotations

from phalanx.core import messages as say
from phalanx.core.messages import Outcome
from phalanx.rendezvous.elastic import ElasticInfo, error_of
from phalanx.rendezvous.elastic_news import Ended, Failure, Formed, Over, Waiting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.agent import SimpleElasticAgent
    from phalanx.core.moves import Ending
    from phalanx.rendezvous.elastic import ElasticRendezvous
    from phalanx.rendezvous.elastic_news import Happening

_LAST_WORD = 5.0  # for the others to hear how it ended here


class Cluster:
    """The bridge between one agent and its membership."""

    def __init__(self, agent: SimpleElasticAgent, handler: ElasticRendezvous) -> None:
        spec = agent.get_worker_group().spec
        self._agent, self._handler = agent, handler
        policy = agent.restart_policy
        # With a window it is the nodes that know when the failures were; the leader then only counts.
        limit = policy.max_restarts if policy.window is None else 1 << 30
        self._membership = handler.attach(
            self._hear, agent.open_meeting, slots=spec.local_world_size, role=spec.role, max_restarts=limit
        )
        self._formed: Formed | None = None
        self._finished = 0  # the round whose workers have succeeded here
        self.failure: Failure | None = None  # what ended the job, the same on every node

    @property
    def waiting(self) -> str:
        """What the nodes wait for."""
        return self._membership.waiting

    # What the agent tells

    def join(self, nothing_alive: bool) -> None:
        """Be in the next round."""
        if not self._membership.started:
            self._membership.start()
        elif nothing_alive:
            self.workers_gone()

    def workers_gone(self) -> None:
        """Nothing of the round at hand is alive on this node."""
        current = self._agent.current_round
        if current is not None:
            self._membership.workers_gone(current.number)

    def info(self, number: int) -> ElasticInfo:
        """The round that is to be started."""
        assert self._formed is not None
        assert self._formed.round.number == number
        return self._handler.info(self._formed)

    def failed(self, command: say.ReportFailure) -> None:
        """Tell the others at once."""
        report, code = self._agent.describe_failure()
        final = command.summary if command.final else ""
        if command.final and command.reason:
            final = command.reason
        failure = Failure(command.summary, final, report, code)
        self._membership.failed(command.round, failure)

    def finished(self, number: int, timeout: float) -> None:
        """Wait for the other nodes: their end is told as BarrierDone."""
        self._finished = number
        self._membership.finished(number, timeout)

    def ending(self, ending: Ending) -> None:
        """The agent stops its workers for good; the others need not wait for that to know it."""
        if ending.outcome in (Outcome.SIGNALED, Outcome.LEFT):
            self._membership.leave(ending.message)

    def leave(self, reason: str) -> None:
        """Nothing is alive here: go."""
        if self._membership.started and not self._membership.ended.is_set():
            self._membership.leave(reason)
            self.workers_gone()
            self._membership.ended.wait(_LAST_WORD)
        self._give_back()

    def close(self, reason: str, job_failed: bool) -> None:
        """The job is over. Its end is the leader's to declare: here we only wait until it has."""
        membership = self._membership
        if membership.started and not membership.ended.is_set():
            if not job_failed:
                membership.leave(reason)
            self.workers_gone()
            if not membership.ended.wait(_LAST_WORD):
                membership.leave(reason)
        self._give_back()

    def _give_back(self) -> None:
        self._membership.release()
        self._drop_served()

    # What the membership tells, from its own thread

    def _hear(self, happening: Happening) -> None:
        match happening:
            case Formed():
                self._on_formed(happening)
            case Over():
                self._agent.post(self._over(happening))
            case Ended():
                self._on_ended(happening)
            case Waiting(text):
                self._agent.show_waiting(text)

    def _on_formed(self, formed: Formed) -> None:
        self._drop_served()
        self._formed = formed
        names = tuple(member.name for member in formed.round.members)
        number, restarts = formed.round.number, formed.round.restarts
        self._agent.post(say.RoundReady(say.Round(number, names, formed.rank, attempt=restarts)))

    def _over(self, over: Over) -> say.Event:
        if over.drained:
            return say.RoundFailed("graceful", over.reason)
        now = over.now
        if now is not None and now.restarts > over.was.restarts and not over.at_once:
            failure = Failure.read(now.cause[2])
            return say.PeerFailed(now.cause[1], over.was.number, now.restarts, failure.summary)
        return say.RoundOver(over.was.number, over.reason, over.at_once)

    def _on_ended(self, ended: Ended) -> None:
        outcome, reason, current = ended.end
        failure = Failure.read(current.cause[2]) if current is not None else Failure("")
        if outcome == "failed" or (outcome == "closed" and failure.final):
            assert current is not None
            self.failure = failure
            number = ended.was.number if ended.was is not None else current.number
            self._agent.post(
                say.PeerFailed(current.cause[1], number, current.restarts, failure.summary, final=True)
            )
        elif outcome == "succeeded" and ended.was is not None and self._finished == ended.was.number:
            self._agent.post(say.BarrierDone(round=self._finished))
        elif outcome == "left" and self._finished and ended.was is not None:
            self._agent.post(say.BarrierDone(False, (reason,), self._finished))
        else:
            kinds = {"succeeded": "closed", "closed": "closed", "timeout": "timeout", "left": "graceful"}
            kind, error = kinds.get(outcome, "error"), error_of(ended, self._handler.settings)
            self._agent.refuse(error if kind in ("timeout", "error") else None)
            self._agent.post(say.RoundFailed(kind, str(error), job_failed=False if kind == "closed" else None))

    def _drop_served(self) -> None:
        """Close what was opened for a round that the agent never started."""
        formed, self._formed = self._formed, None
        served: Any = formed.served if formed is not None else None
        if served is not None and not self._agent.uses(served):
            served.close()
