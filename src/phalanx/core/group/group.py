"""The life of one worker group on one node, as a table.

`step(state, event, now, policy)` is the whole interface: it returns the next state, the commands for
the owner loop, and the reason in words. It has no clock and does nothing itself.

The rules:

- A group is started only when it holds a round *and* every old worker is gone *or parked* *and* its back-off
  has passed. The first two overlap: on a failure the rendezvous is entered while the old workers still
  die (REFORMING). Whichever ends first leads to JOINING (workers gone, no round yet) or CLEARING
  (round there, workers not yet gone). Joining only after the stop was rejected: it adds the slowest
  worker's grace on this node to the waiting time of all nodes.
- A failure counts once for the job, however many nodes report it: everything about a round that is
  already known to have failed (`void`) is the same incident. The node that fails first decides,
  because only it knows the exit code and the error; the others follow its verdict. `final` beats
  "restart" wherever the two meet, and is obeyed at any time.
- Membership changes use no restart. They matter only for the current round; older ones are stale. A
  rendezvous that decides for all nodes reports it with `RoundOver`, which also brings back a node that has
  finished: the others need it. `at_once` kills, even where a stop with a grace is under way.
- A stop that leads to another round is a *recall* where a worker has registered for it: workers that can
  re-enter keep their process and park. It uses a restart exactly as the failure does; a membership change
  uses none. The ranks that a hang is due to are killed at once. Not recalled: workers that save a checkpoint
  (preemption), a node that may have been replaced (`at_once`), and any ending. The same error three times in
  a row means that two re-entries did not help: then all processes are new. The node that fails decides this
  for all nodes, too. The rule about the same failure twice in a row holds only for new processes.
- All workers succeeded: exit barrier, then the end. A barrier that takes too long fails no job. Another
  node's failure or loss re-forms this node too: the others need it. An end of the rendezvous before all
  nodes have reported success is a failure: it stops the workers of the others, or what they did is not known.
- A signal stops the workers with that very signal, then the node leaves the rendezvous without
  closing it. A second one cuts the grace to nothing. A failure that is already ending the job stays
  the outcome, because it explains more than the Ctrl-C that followed it.
- A rendezvous that is closed while this node waits for a round is a clean end, unless the job has failed.
  One that is closed while workers run here is a failure: they have not succeeded.
  The node that closes it states which; where the backend cannot carry that, a job that is closed while this
  node recovers from a failure counts as failed.
- A requested restart (by a person, or by the program that drives the agent) is not a failure: all nodes
  re-form, and no restart is used.
- A worker that outlives SIGKILL is never started over: the outcome is FAILED and names it.
- A start that fails is not tried again (a missing program stays missing) unless the shell reports that
  the cause may pass. It is this node's failure, not the job's: the node fails and leaves, and the job goes
  on without it where it can (`ReportFailure.unfit`; core.rounds decides that).
- A preemption is the job's. Announced on one node, it stops the workers of all nodes with the preemption
  signal and the whole grace, so that every rank saves its part of a checkpoint. Only then does the node
  leave, and the others form the next round.

MOVES lists what an event may lead to, LATE what may be in the queue still although it no longer
matters. Everything else is a bug in the owner loop: `IllegalMove`, with the recent history.

Events and commands are in `core.group.events`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from phalanx.core import exit_codes
from phalanx.core.group import restarts
from phalanx.core.group.events import (
    AllSucceeded,
    BarrierDone,
    CloseRendezvous,
    Command,
    EnterBarrier,
    Event,
    Finish,
    GroupRound,
    Hang,
    Join,
    Leave,
    MembershipChanged,
    Note,
    Outcome,
    PeerFailed,
    RecallWorkers,
    ReportFailure,
    RequestRound,
    RestartRequested,
    RoundFailed,
    RoundOver,
    RoundReady,
    SiblingStop,
    Signal,
    Start,
    Started,
    StartFailed,
    StartWorkers,
    Stopped,
    StopWorkers,
    Tick,
    Uninterruptible,
    WakeAt,
    WorkerFailed,
    WorkersReenter,
    WorkerState,
)
from phalanx.core.group.restarts import Failure, History, RestartPolicy
from phalanx.core.record import Record
from phalanx.core.text_enum import TextEnum
from phalanx.errors import PhalanxError

TYPE_CHECKING = False  # typing is not imported on the way to the first line of user code
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Handler: TypeAlias = Callable[["GroupState", Any, float, "GroupPolicy"], "Step"]
    Row: TypeAlias = Mapping[type[Any], tuple[Handler, tuple["Phase", ...]]]


class Phase(TextEnum):
    """Where the owner loop stands; `WorkerState` is the coarser view for the outside."""

    NEW = "NEW"
    JOINING = "JOINING"
    REFORMING = "REFORMING"
    CLEARING = "CLEARING"
    WAITING = "WAITING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    BARRIER = "BARRIER"
    ENDING = "ENDING"
    DONE = "DONE"


class IllegalMove(PhalanxError, RuntimeError):
    """The owner loop broke the contract; the message has the event, the phase, and what came before."""


class GroupPolicy(Record):
    """What the owner of the job chose."""

    restarts: RestartPolicy = RestartPolicy()
    stop_signal: int = signal.SIGTERM
    grace: float = 30.0
    stop_by_helpers: bool = False
    preempt_signal: int = 0
    """Announces a preemption; 0: none does on this node."""
    reenter_timeout: float = 0.0
    """Seconds for a worker to re-enter; 0: every stop ends all workers."""

    @property
    def at_failure(self) -> SiblingStop:
        """How the siblings of a failed worker end."""
        return SiblingStop(self.stop_signal, self.grace, self.stop_by_helpers)


class Ending(Record):
    """What the group ends as, once its workers are gone."""

    outcome: Outcome
    message: str
    sig: int | None = None
    preempted: bool = False
    code: int = exit_codes.FAILURE
    """Of a failure without an exit code of a worker; 93 in any case."""


class GroupState(Record):
    """All there is to know about the group; made by `step` only."""

    phase: Phase = Phase.NEW
    worker_state: WorkerState = WorkerState.INIT
    round: GroupRound | None = None
    void: int = -1
    """The latest round known to have failed."""
    history: History = History()
    started_at: float = 0.0
    stop_by: float = 0.0
    not_before: float = 0.0
    cause: str = ""
    """The failure that the group recovers from; empty once the workers run again."""
    reenters: bool = False
    """Whether a worker of this node has registered for re-entry."""
    same: tuple[str, int] = ("", 0)
    """The last error, and how many recalls in a row were due to it."""
    parked: int = 0
    """Workers of this node that the last stop left to re-enter."""
    ending: Ending | None = None
    signals: int = 0
    recent: tuple[str, ...] = ()

    @property
    def attempt(self) -> int:
        """Restarts used by the job so far."""
        return self.history.attempt


class Step(Record):
    """The answer to one event."""

    state: GroupState
    commands: tuple[Command, ...]
    reason: str


_ALIVE = frozenset({Phase.STARTING, Phase.RUNNING})
_RECALLS = 2
"""Recalls for the same error in a row."""
_DYING = frozenset({Phase.REFORMING, Phase.CLEARING, Phase.ENDING})


def complaint(state: GroupState, event: Event, what: str) -> str:
    """The message of an illegal move."""
    past = "\n  ".join(state.recent) or "(nothing)"
    return f"{event!r} in phase {state.phase.value} {what}; before it:\n  {past}"


# ---- the moves ---------------------------------------------------------------------------------------


def _go(state: GroupState, phase: Phase, reason: str, *commands: Command, **changes: Any) -> Step:
    return Step(state.replace(phase=phase, **changes), commands, reason)


def _stay(state: GroupState, reason: str, **changes: Any) -> Step:
    """No move."""
    return _go(state, state.phase, reason, **changes)


def on_start(state: GroupState, event: Start, now: float, policy: GroupPolicy) -> Step:
    return _go(state, Phase.JOINING, "joining the rendezvous", Join(state.attempt))


def on_round_ready(state: GroupState, event: RoundReady, now: float, policy: GroupPolicy) -> Step:
    new = event.round
    if state.round is not None and new.number <= state.round.number:
        raise IllegalMove(complaint(state, event, f"follows round {state.round.number}: numbers must grow"))
    if new.number <= state.void:
        return _go(
            state, state.phase, f"round {new.number} has failed already; joining again", Join(state.attempt)
        )
    # A failure that met a change of members in the same moment may not have been counted: then it was none.
    attempt = new.attempt if new.counted else max(state.attempt, new.attempt)
    history = state.history.replace(attempt=attempt)
    state = state.replace(round=new, history=history)
    if state.phase is Phase.REFORMING:
        return _go(state, Phase.CLEARING, f"round {new.number} is ready; waiting for the old workers to end")
    return _start_or_wait(state, now)


def _start_or_wait(state: GroupState, now: float) -> Step:
    """A round is there and no worker is alive."""
    assert state.round is not None, "a start needs a round"
    if now < state.not_before:
        reason = f"round {state.round.number} is ready; back-off for {state.not_before - now:g} s"
        return _go(state, Phase.WAITING, reason, WakeAt(state.not_before))
    reason = f"starting workers of round {state.round.number} as node {state.round.node_rank}"
    if state.attempt:
        reason += f", attempt {state.attempt}"
    command = StartWorkers(state.round, state.attempt)
    changes = {"started_at": now, "worker_state": WorkerState.INIT, "reenters": False}
    return _go(state, Phase.STARTING, reason, command, **changes)


def on_tick(state: GroupState, event: Tick, now: float, policy: GroupPolicy) -> Step:
    return _start_or_wait(state, now)


def on_round_failed(state: GroupState, event: RoundFailed, now: float, policy: GroupPolicy) -> Step:
    told = f": {event.message}" if event.message else ""
    after = f" (while recovering from: {state.cause})" if state.cause else ""
    if event.kind == "graceful":
        return _end(state, now, policy, Ending(Outcome.LEFT, f"left the rendezvous{told}"))
    job_failed = bool(state.cause) if event.job_failed is None else event.job_failed
    if event.kind == "closed" and not job_failed and (state.phase in _ALIVE or state.phase is Phase.BARRIER):
        when = (
            "before all nodes had succeeded"
            if state.phase is Phase.BARRIER
            else "while workers of this node were running"
        )
        message = f"the job was closed {when}{told}"
        return _end(state, now, policy, Ending(Outcome.FAILED, message), Note(message))
    if event.kind == "closed" and not job_failed:
        return _end(state, now, policy, Ending(Outcome.CLOSED, event.message or "the rendezvous is closed"))
    what = {"closed": "the rendezvous was closed", "timeout": "the rendezvous timed out"}
    message = f"{what.get(event.kind, 'the rendezvous failed')}{told}{after}"
    code = exit_codes.NO_MEETING if event.kind == "timeout" else exit_codes.FAILURE
    return _end(state, now, policy, Ending(Outcome.FAILED, message, code=code), Note(message))


def on_started(state: GroupState, event: Started, now: float, policy: GroupPolicy) -> Step:
    changes = {"worker_state": WorkerState.HEALTHY, "started_at": now, "cause": ""}
    return _go(
        state, Phase.RUNNING, f"workers are running (pids {', '.join(map(str, event.pids))})", **changes
    )


def on_workers_reenter(state: GroupState, event: WorkersReenter, now: float, policy: GroupPolicy) -> Step:
    reason = "workers can re-enter" if event.can else "no worker re-enters any more"
    return _stay(state, reason, reenters=event.can)


def on_start_failed(state: GroupState, event: StartFailed, now: float, policy: GroupPolicy) -> Step:
    # Nothing is alive: JOINING has the same meaning for what follows, and there is nothing to stop.
    idle = state.replace(phase=Phase.JOINING)
    if event.retry:
        return _failure(idle, now, policy, event.message, Failure(now, event.message))
    code = exit_codes.UNFIT_NODE
    report = ReportFailure(_number(state), state.attempt, event.message, final=True, unfit=True, code=code)
    message = f"{event.message}; not restarted: a start that fails would fail again"
    return _end(idle, now, policy, Ending(Outcome.FAILED, message, code=code), report, Note(message))


def on_worker_failed(state: GroupState, event: WorkerFailed, now: float, policy: GroupPolicy) -> Step:
    error = event.error or event.summary
    lived = now - state.started_at
    failure = Failure(now, error, event.exit_code, lived, event.kinds, event.step, event.signature)
    state = state.replace(worker_state=WorkerState.FAILED)
    return _failure(state, now, policy, event.summary, failure)


def on_unhealthy(state: GroupState, event: Hang | Uninterruptible, now: float, policy: GroupPolicy) -> Step:
    if isinstance(event, Hang):
        summary = event.summary
        if event.final:
            code = exit_codes.HANG
            report = ReportFailure(
                _number(state), state.attempt, summary, final=True, ranks=event.ranks, code=code
            )
            state = state.replace(worker_state=WorkerState.UNHEALTHY)
            return _end(state, now, policy, Ending(Outcome.FAILED, summary, code=code), report, Note(summary))
    else:
        pids = ", ".join(map(str, event.pids))
        summary = f"workers in uninterruptible sleep (pid {pids})"
    state = state.replace(worker_state=WorkerState.UNHEALTHY)
    failure = Failure(now, summary, None, now - state.started_at)
    if isinstance(event, Uninterruptible):
        policy = policy.replace(reenter_timeout=0.0)  # a recall would wait for it in vain
        return _failure(state, now, policy, summary, failure, exit_codes.HANG)
    failure = failure.replace(step=event.step, signature=event.signature)
    return _failure(state, now, policy, summary, failure, exit_codes.HANG, event.ranks)


def _failure(
    state: GroupState,
    now: float,
    policy: GroupPolicy,
    summary: str,
    failure: Failure,
    code: int = exit_codes.FAILURE,
    culprits: tuple[int, ...] = (),
) -> Step:
    """This node's own failure: decide for the job, and tell the others; `code`: where no worker has one."""
    number = _number(state)
    allowed = policy.restarts
    if state.parked:
        allowed = allowed.replace(same_failure=False)  # new processes may help where a re-entry did not
    verdict = restarts.decide(state.history, failure, now, allowed)
    code = verdict.code or code
    line = f"{summary}; {verdict.reason}"
    if not verdict.restart:
        report = ReportFailure(number, state.attempt, summary, final=True, ranks=culprits, code=code)
        return _end(state, now, policy, Ending(Outcome.FAILED, line, code=code), report, Note(line))
    history = restarts.record(state.history, failure, policy.restarts)
    times = state.same[1] + 1 if failure.error == state.same[0] else 1
    fresh = bool(policy.reenter_timeout) and times > _RECALLS
    same = ("", 0) if fresh else (failure.error, times)
    if fresh:
        line += f", in new processes: {_RECALLS} re-entries in a row ended with the same error"
    report = ReportFailure(
        number,
        history.attempt,
        summary,
        final=False,
        delay=verdict.delay,
        fresh=fresh,
        ranks=culprits,
        code=code,
        step=failure.step,
        signature=failure.signature,
    )
    state = state.replace(history=history, void=number, cause=summary, not_before=now + verdict.delay)
    return _recall(
        state.replace(same=same), now, policy, line, report, cause=summary, culprits=culprits, fresh=fresh
    )


def on_peer_failed(state: GroupState, event: PeerFailed, now: float, policy: GroupPolicy) -> Step:
    what = f"node {event.node}: {event.summary or 'failed'}"
    if event.final:
        return _final(state, event, now, policy, what)
    if event.round <= state.void or event.round < _number(state):
        history = state.history.replace(attempt=max(state.attempt, event.attempt))
        return _stay(state, f"{what}; the failure of round {event.round} is known already", history=history)
    ran = state.phase in _ALIVE or state.phase is Phase.BARRIER
    lived = now - state.started_at if ran else 0.0
    failure = Failure(now, event.summary, None, lived, step=event.step, signature=event.signature)
    history = restarts.record(state.history, failure, policy.restarts, event.attempt)
    not_before = max(state.not_before, now + event.delay)
    # A node that was in no round yet has lost nothing: it recovers from nothing.
    cause = what if state.round is not None else ""
    state = state.replace(history=history, void=event.round, cause=cause, not_before=not_before)
    line = f"{what}; re-forming for attempt {state.attempt}" + (f", in {event.delay:g} s" * bool(event.delay))
    if state.phase in (Phase.JOINING, Phase.REFORMING):
        # A round that this node does not know yet: its RoundReady, if it still comes, is void.
        return _stay(state, line)
    return _recall(state, now, policy, line, cause=what, culprits=event.ranks, fresh=event.fresh)


def on_peer_failed_late(state: GroupState, event: PeerFailed, now: float, policy: GroupPolicy) -> Step:
    what = f"node {event.node}: {event.summary or 'failed'}"
    if event.final:
        return _final(state, event, now, policy, what)
    return _stay(state, f"{what}; this node is ending already")


def _final(state: GroupState, event: PeerFailed, now: float, policy: GroupPolicy, what: str) -> Step:
    """Another node has ended the job."""
    if state.ending is not None and state.ending.outcome in (Outcome.FAILED, Outcome.SIGNALED):
        return _stay(state, f"{what}; the job is ending already")
    message = f"{what}; the job has failed"
    return _end(state, now, policy, Ending(Outcome.FAILED, message), Note(message))


def on_membership(state: GroupState, event: MembershipChanged, now: float, policy: GroupPolicy) -> Step:
    if event.round is not None and event.round != _number(state):
        return _stay(state, f"a membership change of round {event.round} is out of date")
    causes = []
    if event.lost:
        causes.append(f"lost {', '.join(event.lost)}")
    if event.waiting:
        causes.append(f"{event.waiting} waiting to join")
    if not causes:
        return _stay(state, "membership is unchanged")
    why = " and ".join(causes)
    return _recall(state, now, policy, f"{why}; re-forming, which uses no restart", cause=why)


def on_round_over(state: GroupState, event: RoundOver, now: float, policy: GroupPolicy) -> Step:
    kill: tuple[Command, ...] = ()
    if event.at_once:
        policy = policy.replace(stop_signal=signal.SIGKILL, grace=0.0)
        if state.phase in _DYING:
            kill, state = (StopWorkers(signal.SIGKILL, 0.0),), state.replace(stop_by=now)
    if state.phase in (Phase.REFORMING, Phase.ENDING):
        what = "killing what is left" if kill else "the workers are being stopped already"
        return _go(state, state.phase, f"{event.reason}; {what}", *kill)
    if event.round != _number(state):
        return _go(state, state.phase, f"the end of round {event.round} is out of date", *kill)
    line = f"{event.reason}; re-forming, which uses no restart"
    if not event.at_once and not event.preempted:
        return _recall(state, now, policy, line, cause=event.reason)
    if not event.at_once:
        policy = policy.replace(stop_signal=policy.preempt_signal)
    return _reform(state, now, policy, line, *kill)


def on_restart_requested(state: GroupState, event: RestartRequested, now: float, policy: GroupPolicy) -> Step:
    line = f"{event.reason}; re-forming, which uses no restart"
    return _reform(state, now, policy, line, RequestRound(_number(state), state.attempt, event.reason))


def on_succeeded(state: GroupState, event: AllSucceeded, now: float, policy: GroupPolicy) -> Step:
    command = EnterBarrier(_number(state))
    changes = {"worker_state": WorkerState.SUCCEEDED, "cause": ""}
    return _go(state, Phase.BARRIER, "all workers succeeded; waiting for the other nodes", command, **changes)


def on_barrier_done(state: GroupState, event: BarrierDone, now: float, policy: GroupPolicy) -> Step:
    if event.round is not None and event.round != _number(state):
        return _stay(state, f"the barrier of round {event.round} is out of date")
    message = "all workers succeeded"
    if event.ok:
        return _end(state, now, policy, Ending(Outcome.SUCCEEDED, message))
    gone = f" from {', '.join(event.missing)}" if event.missing else ""
    message += f"; the exit barrier ended without word{gone}"
    return _end(state, now, policy, Ending(Outcome.SUCCEEDED, message), Note(message))


def on_signal(state: GroupState, event: Signal, now: float, policy: GroupPolicy) -> Step:
    name = signal_name(event.sig)
    state = state.replace(signals=state.signals + 1)
    if state.signals > 2:
        return _stay(state, f"{name}: the workers are being killed already")
    if state.signals == 2:
        return _go(
            state,
            state.phase,
            f"second signal, {name}: killing the workers now",
            StopWorkers(signal.SIGKILL, 0.0),
            Note(f"{name} again: killing the workers"),
            stop_by=now,
        )
    preempted = event.sig == policy.preempt_signal
    sent = policy.stop_signal if event.stray else event.sig
    ending = Ending(Outcome.SIGNALED, f"stopped by {name}", event.sig, preempted)
    if state.ending is not None and state.ending.outcome is Outcome.FAILED:
        ending = state.ending
    note = Note(f"{name}: stopping" + " (it is not one of --signals-to-handle)" * event.stray)
    if state.phase in _DYING:
        again = StopWorkers(sent, max(0.0, state.stop_by - now))
        return _go(state, Phase.ENDING, f"{name} while stopping", again, note, ending=ending)
    return _end(state, now, policy, ending, note, sent=sent)


def on_stopped(state: GroupState, event: Stopped, now: float, policy: GroupPolicy) -> Step:
    if event.unkillable:
        return _unkillable(state, event, now, policy)
    if state.phase is Phase.ENDING:
        assert state.ending is not None, "ENDING knows how it ends"
        return _finish(state.replace(worker_state=WorkerState.STOPPED), state.ending)
    state = state.replace(worker_state=WorkerState.STOPPED, parked=event.parked)
    if not event.parked:
        state = state.replace(same=("", 0))  # no worker re-enters, so the error cannot be due to that
    if state.phase is Phase.CLEARING:
        return _start_or_wait(state, now)
    parked = f" or parked ({event.parked})" * bool(event.parked)
    return _go(state, Phase.JOINING, f"the old workers are gone{parked}; waiting for the round")


def _unkillable(state: GroupState, event: Stopped, now: float, policy: GroupPolicy) -> Step:
    """Something outlived SIGKILL: it still holds its devices and ports, so nothing is started over it."""
    names = f"could not be killed: {', '.join(event.unkillable)}"
    state = state.replace(worker_state=WorkerState.UNHEALTHY)
    ending = state.ending
    if ending is not None and ending.outcome in (Outcome.FAILED, Outcome.SIGNALED):
        return _finish(state, ending.replace(message=f"{ending.message}; {names}"), Note(names))
    message = f"{state.cause}; {names}" if state.cause else names
    report = ReportFailure(_number(state), state.attempt, message, final=True)
    return _finish(state, Ending(Outcome.FAILED, message), report, Note(f"{names}; not restarted over it"))


# ---- what several moves share ------------------------------------------------------------------------


def _reform(state: GroupState, now: float, policy: GroupPolicy, reason: str, *tell: Command) -> Step:
    """Enter the rendezvous again, and stop what is alive at the same time: the stop goes out first."""
    join, note = Join(state.attempt), Note(reason)
    if state.phase in _ALIVE:
        stop = StopWorkers(policy.stop_signal, policy.grace)
        return _go(state, Phase.REFORMING, reason, stop, *tell, join, note, stop_by=now + policy.grace)
    if state.phase is Phase.CLEARING:
        return _go(state, Phase.REFORMING, reason, *tell, join, note)
    return _go(state, Phase.JOINING, reason, *tell, join, note, worker_state=WorkerState.STOPPED)


def _recall(
    state: GroupState,
    now: float,
    policy: GroupPolicy,
    reason: str,
    *tell: Command,
    cause: str,
    culprits: tuple[int, ...] = (),
    fresh: bool = False,
) -> Step:
    """As `_reform`, but workers that can re-enter keep their process, unless all are to be `fresh`."""
    step = _reform(state, now, policy, reason, *tell)
    if not (policy.reenter_timeout and state.reenters) or fresh:
        return step
    commands = tuple(
        RecallWorkers(one.sig, one.grace, policy.reenter_timeout, cause, culprits)
        if isinstance(one, StopWorkers)
        else one
        for one in step.commands
    )
    return step.replace(commands=commands)


def _end(
    state: GroupState, now: float, policy: GroupPolicy, ending: Ending, *tell: Command, sent: int = 0
) -> Step:
    """End the group as `ending`, once nothing of it is alive."""
    if state.phase in _ALIVE:
        stop = StopWorkers(sent or ending.sig or policy.stop_signal, policy.grace)
        changes = {"ending": ending, "stop_by": now + policy.grace}
        return _go(state, Phase.ENDING, ending.message, stop, *tell, **changes)
    if state.phase in _DYING:
        return _go(state, Phase.ENDING, ending.message, *tell, ending=ending)
    return _finish(state, ending, *tell)


def _finish(state: GroupState, ending: Ending, *tell: Command) -> Step:
    """Nothing is alive (or nothing more can be done about it): tell the other nodes, and end."""
    departure: tuple[Command, ...] = ()
    if ending.outcome in (Outcome.SUCCEEDED, Outcome.FAILED):
        departure = (CloseRendezvous(ending.message, ending.outcome is Outcome.FAILED),)
    elif ending.outcome is not Outcome.CLOSED:
        departure = (Leave(),)
    final = state.worker_state
    if ending.outcome is Outcome.FAILED:
        final = WorkerState.FAILED
    elif final not in (WorkerState.SUCCEEDED, WorkerState.UNHEALTHY):
        final = WorkerState.STOPPED
    finish = Finish(ending.outcome, final, ending.message, ending.sig, ending.code)
    return _go(
        state, Phase.DONE, ending.message, *tell, *departure, finish, ending=ending, worker_state=final
    )


def _number(state: GroupState) -> int:
    """The number of the current round, -1 before the first."""
    return -1 if state.round is None else state.round.number


def signal_name(sig: int) -> str:
    """SIGTERM for 15; unnamed ones (real-time) by number."""
    try:
        return signal.Signals(sig).name
    except ValueError:
        return f"signal {sig}"


# ---- the table ---------------------------------------------------------------------------------------

_HISTORY = 12
"""Moves remembered for the message of an illegal one."""

_FOR_WORKERS = "waiting for the workers to end"


class PhaseWords(Record):
    """How a phase is called: its `meaning` for a reader of the table; what a person reads who waits
    (`waiting`, empty where that is as it should be) or asks (`status`); and the `state` of the node, in which
    several phases are one."""

    meaning: str
    waiting: str
    status: str
    state: str


WORDS: Mapping[Phase, PhaseWords] = {
    Phase.NEW: PhaseWords("nothing has happened yet", "", "starting", "waiting"),
    Phase.JOINING: PhaseWords(
        "in the rendezvous, no worker alive",
        "waiting for the rendezvous",
        "waiting for the rendezvous",
        "waiting",
    ),
    Phase.REFORMING: PhaseWords(
        "in the rendezvous, old workers still dying", _FOR_WORKERS, "re-forming", "forming"
    ),
    Phase.CLEARING: PhaseWords("round known, old workers still dying", _FOR_WORKERS, "re-forming", "forming"),
    Phase.WAITING: PhaseWords(
        "round known, workers gone, back-off not over",
        "waiting before the next start",
        "waiting before the next start",
        "forming",
    ),
    Phase.STARTING: PhaseWords(
        "workers are being started", "waiting for the workers to start", "starting workers", "starting"
    ),
    Phase.RUNNING: PhaseWords("workers run", "", "running", "running"),
    Phase.BARRIER: PhaseWords(
        "own workers succeeded, waiting for the other nodes",
        "waiting for the other nodes to finish",
        "finished on this node, waiting for the other nodes",
        "finished",
    ),
    Phase.ENDING: PhaseWords("workers are being stopped, for good", _FOR_WORKERS, "ending", "ending"),
    Phase.DONE: PhaseWords("the end", "", "ended", "ending"),
}
"""Every word for a phase; nothing else has a table of them."""

NEW, JOINING, REFORMING, CLEARING, WAITING, STARTING, RUNNING, BARRIER, ENDING, DONE = Phase

_UP: Row = {
    WorkerFailed: (on_worker_failed, (REFORMING, ENDING)),
    Hang: (on_unhealthy, (REFORMING, ENDING)),
    Uninterruptible: (on_unhealthy, (REFORMING, ENDING)),
    AllSucceeded: (on_succeeded, (BARRIER,)),
    Signal: (on_signal, (ENDING,)),
}
"""Workers may be alive. A worker may be quicker to end than the start of its siblings, hence both phases."""

MOVES: Mapping[Phase, Row] = {
    NEW: {
        Start: (on_start, (JOINING,)),
        Signal: (on_signal, (DONE,)),
    },
    JOINING: {
        RoundReady: (on_round_ready, (STARTING, WAITING, JOINING)),
        RoundFailed: (on_round_failed, (DONE,)),
        PeerFailed: (on_peer_failed, (JOINING, DONE)),
        Signal: (on_signal, (DONE,)),
    },
    REFORMING: {
        RoundReady: (on_round_ready, (CLEARING, REFORMING)),
        RoundFailed: (on_round_failed, (ENDING,)),
        Stopped: (on_stopped, (JOINING, DONE)),
        PeerFailed: (on_peer_failed, (REFORMING, ENDING)),
        Signal: (on_signal, (ENDING,)),
        RoundOver: (on_round_over, (REFORMING,)),
    },
    CLEARING: {
        Stopped: (on_stopped, (STARTING, WAITING, DONE)),
        MembershipChanged: (on_membership, (REFORMING, CLEARING)),
        PeerFailed: (on_peer_failed, (REFORMING, CLEARING, ENDING)),
        Signal: (on_signal, (ENDING,)),
        RoundOver: (on_round_over, (REFORMING, CLEARING)),
        RoundFailed: (on_round_failed, (ENDING,)),
    },
    WAITING: {
        Tick: (on_tick, (STARTING, WAITING)),
        MembershipChanged: (on_membership, (JOINING, WAITING)),
        PeerFailed: (on_peer_failed, (JOINING, WAITING, DONE)),
        Signal: (on_signal, (DONE,)),
        RoundOver: (on_round_over, (JOINING, WAITING)),
        RoundFailed: (on_round_failed, (DONE,)),
    },
    STARTING: {
        **_UP,
        RestartRequested: (on_restart_requested, (REFORMING,)),
        Started: (on_started, (RUNNING,)),
        StartFailed: (on_start_failed, (JOINING, DONE)),
        MembershipChanged: (on_membership, (REFORMING, STARTING)),
        PeerFailed: (on_peer_failed, (REFORMING, STARTING, ENDING)),
        RoundOver: (on_round_over, (REFORMING, STARTING)),
        RoundFailed: (on_round_failed, (ENDING,)),
    },
    RUNNING: {
        **_UP,
        WorkersReenter: (on_workers_reenter, (RUNNING,)),
        RestartRequested: (on_restart_requested, (REFORMING,)),
        MembershipChanged: (on_membership, (REFORMING, RUNNING)),
        PeerFailed: (on_peer_failed, (REFORMING, RUNNING, ENDING)),
        RoundOver: (on_round_over, (REFORMING, RUNNING)),
        RoundFailed: (on_round_failed, (ENDING,)),
    },
    BARRIER: {
        BarrierDone: (on_barrier_done, (DONE, BARRIER)),
        PeerFailed: (on_peer_failed, (JOINING, BARRIER, DONE)),
        Signal: (on_signal, (DONE,)),
        RoundOver: (on_round_over, (JOINING, BARRIER)),
        RoundFailed: (on_round_failed, (DONE,)),
        RestartRequested: (on_restart_requested, (JOINING,)),
    },
    ENDING: {
        Stopped: (on_stopped, (DONE,)),
        PeerFailed: (on_peer_failed_late, (ENDING,)),
        Signal: (on_signal, (ENDING,)),
        RoundOver: (on_round_over, (ENDING,)),
    },
    DONE: {},
}

_WATCHDOGS: frozenset[type[Any]] = frozenset({Hang, Uninterruptible, RestartRequested, Tick, BarrierDone})
"""Posted by other threads, which may be a moment behind the owner."""
_EXITS: frozenset[type[Any]] = frozenset({Started, StartFailed, WorkerFailed, AllSucceeded, WorkersReenter})
"""Posted about workers that are being stopped. After `Stopped` nothing more may come about them: it
would be taken for news of the next ones, so there it is illegal."""

LATE: Mapping[Phase, frozenset[type[Any]]] = {
    NEW: frozenset(),
    JOINING: _WATCHDOGS | {MembershipChanged, RoundOver},
    REFORMING: _WATCHDOGS | _EXITS | {MembershipChanged},
    CLEARING: _WATCHDOGS | _EXITS,
    WAITING: _WATCHDOGS - {Tick},
    STARTING: frozenset({Tick, BarrierDone}),
    RUNNING: frozenset({Tick, BarrierDone}),
    BARRIER: (_WATCHDOGS - {BarrierDone, RestartRequested}) | {Started, MembershipChanged, WorkersReenter},
    ENDING: _WATCHDOGS | _EXITS | {MembershipChanged, RoundReady, RoundFailed},
    DONE: _WATCHDOGS
    | _EXITS
    | {MembershipChanged, RoundOver, RoundReady, RoundFailed, Stopped, PeerFailed, Signal},
}


def step(state: GroupState, event: Event, now: float, policy: GroupPolicy) -> Step:
    """One event in; the next state, the commands and the reason out."""
    kind, phase = type(event), state.phase
    move = MOVES[phase].get(kind)
    if move is None:
        if kind not in LATE[phase]:
            raise IllegalMove(complaint(state, event, "is not possible"))
        return Step(state, (), f"{kind.__name__} in {phase.value}: it no longer matters")
    handler, targets = move
    made = handler(state, event, now, policy)
    after = made.state
    if after.phase not in targets:
        what = f"led to {after.phase.value}, which the table does not allow"
        raise IllegalMove(complaint(state, event, what))
    line = f"{now:.3f} {phase.value} --{kind.__name__}--> {after.phase.value}: {made.reason}"
    return made.replace(state=after.replace(recent=(*after.recent, line)[-_HISTORY:]))
