"""The life of one worker group on one node, as a table.

`step(state, event, now, policy)` is the whole interface: it returns the next state, the commands for
the owner loop, and the reason in words. It has no clock and does nothing itself.

The rules:

- A group is started only when it holds a round *and* every old worker is gone *and* its back-off has
  passed. The first two overlap: on a failure the rendezvous is entered while the old workers still
  die (REFORMING). Whichever ends first leads to JOINING (workers gone, no round yet) or CLEARING
  (round there, workers not yet gone). Joining only after the stop was rejected: it adds the slowest
  worker's grace on this node to the waiting time of all nodes.
- A failure counts once for the job, however many nodes report it: everything about a round that is
  already known to have failed (`void`) is the same incident. The node that fails first decides,
  because only it knows the exit code and the error; the others follow its verdict. `final` beats
  "restart" wherever the two meet, and is obeyed at any time.
- Membership changes use no restart. They matter only for the round at hand; older ones are stale. A
  rendezvous that decides for all nodes says so with `RoundOver`, which also brings back a node that has
  finished: the others need it. `at_once` kills, also where a stop with a grace is under way.
- All workers succeeded: exit barrier, then the end. Nothing that happens in the barrier can fail the
  job except another node's failure, which re-forms this node too: the others need it.
- A signal stops the workers with that very signal, then the node leaves the rendezvous without
  closing it. A second one cuts the grace to nothing. A failure that is already ending the job stays
  the outcome, because it says more than the Ctrl-C that followed it.
- A rendezvous that is closed while we wait for a round is a clean end, unless the job has failed. Who
  closes says which; where the backend cannot carry that, we take it that a job which closes while we
  recover from a failure did not recover.
- A worker that outlives SIGKILL is never started over: the outcome is FAILED and names it.
- A start that fails is not tried again (a missing program stays missing) unless the shell says that
  the cause may pass.

MOVES lists what an event may lead to, LATE what may be in the queue still although it no longer
matters. Everything else is a bug in the owner loop: `IllegalMove`, with the recent history.

The moves themselves are in `core.moves`, the events and commands in `core.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from phalanx.core import moves
from phalanx.core.messages import (
    AllSucceeded,
    BarrierDone,
    Event,
    Hang,
    MembershipChanged,
    Outcome,
    PeerFailed,
    Round,
    RoundFailed,
    RoundOver,
    RoundReady,
    Signal,
    Start,
    Started,
    StartFailed,
    Stopped,
    Tick,
    Uninterruptible,
    WorkerFailed,
    WorkerState,
)
from phalanx.core.moves import Ending, GroupPolicy, GroupState, IllegalMove, Phase, Step

__all__ = [
    "LATE",
    "MEANING",
    "MOVES",
    "Ending",
    "GroupPolicy",
    "GroupState",
    "IllegalMove",
    "Outcome",
    "Phase",
    "Round",
    "Step",
    "WorkerState",
    "diagram",
    "step",
]

_HISTORY = 12
"""Moves remembered for the message of an illegal one."""

MEANING: Mapping[Phase, str] = {
    Phase.NEW: "nothing has happened yet",
    Phase.JOINING: "in the rendezvous, no worker alive",
    Phase.REFORMING: "in the rendezvous, old workers still dying",
    Phase.CLEARING: "round known, old workers still dying",
    Phase.WAITING: "round known, workers gone, back-off not over",
    Phase.STARTING: "workers are being started",
    Phase.RUNNING: "workers run",
    Phase.BARRIER: "own workers succeeded, waiting for the other nodes",
    Phase.ENDING: "workers are being stopped, for good",
    Phase.DONE: "the end",
}

Handler: TypeAlias = Callable[[GroupState, Any, float, GroupPolicy], Step]
Row: TypeAlias = Mapping[type[Any], tuple[Handler, tuple[Phase, ...]]]

NEW, JOINING, REFORMING, CLEARING, WAITING, STARTING, RUNNING, BARRIER, ENDING, DONE = Phase

_UP: Row = {
    WorkerFailed: (moves.on_worker_failed, (REFORMING, ENDING)),
    Hang: (moves.on_unhealthy, (REFORMING, ENDING)),
    Uninterruptible: (moves.on_unhealthy, (REFORMING, ENDING)),
    AllSucceeded: (moves.on_succeeded, (BARRIER,)),
    Signal: (moves.on_signal, (ENDING,)),
}
"""Workers may be alive. A worker may be quicker to end than the start of its siblings, hence both phases."""

MOVES: Mapping[Phase, Row] = {
    NEW: {
        Start: (moves.on_start, (JOINING,)),
        Signal: (moves.on_signal, (DONE,)),
    },
    JOINING: {
        RoundReady: (moves.on_round_ready, (STARTING, WAITING, JOINING)),
        RoundFailed: (moves.on_round_failed, (DONE,)),
        PeerFailed: (moves.on_peer_failed, (JOINING, DONE)),
        Signal: (moves.on_signal, (DONE,)),
    },
    REFORMING: {
        RoundReady: (moves.on_round_ready, (CLEARING, REFORMING)),
        RoundFailed: (moves.on_round_failed, (ENDING,)),
        Stopped: (moves.on_stopped, (JOINING, DONE)),
        PeerFailed: (moves.on_peer_failed, (REFORMING, ENDING)),
        Signal: (moves.on_signal, (ENDING,)),
        RoundOver: (moves.on_round_over, (REFORMING,)),
    },
    CLEARING: {
        Stopped: (moves.on_stopped, (STARTING, WAITING, DONE)),
        MembershipChanged: (moves.on_membership, (REFORMING, CLEARING)),
        PeerFailed: (moves.on_peer_failed, (REFORMING, CLEARING, ENDING)),
        Signal: (moves.on_signal, (ENDING,)),
        RoundOver: (moves.on_round_over, (REFORMING, CLEARING)),
        RoundFailed: (moves.on_round_failed, (ENDING,)),
    },
    WAITING: {
        Tick: (moves.on_tick, (STARTING, WAITING)),
        MembershipChanged: (moves.on_membership, (JOINING, WAITING)),
        PeerFailed: (moves.on_peer_failed, (JOINING, WAITING, DONE)),
        Signal: (moves.on_signal, (DONE,)),
        RoundOver: (moves.on_round_over, (JOINING, WAITING)),
        RoundFailed: (moves.on_round_failed, (DONE,)),
    },
    STARTING: {
        **_UP,
        Started: (moves.on_started, (RUNNING,)),
        StartFailed: (moves.on_start_failed, (JOINING, DONE)),
        MembershipChanged: (moves.on_membership, (REFORMING, STARTING)),
        PeerFailed: (moves.on_peer_failed, (REFORMING, STARTING, ENDING)),
        RoundOver: (moves.on_round_over, (REFORMING, STARTING)),
        RoundFailed: (moves.on_round_failed, (ENDING,)),
    },
    RUNNING: {
        **_UP,
        MembershipChanged: (moves.on_membership, (REFORMING, RUNNING)),
        PeerFailed: (moves.on_peer_failed, (REFORMING, RUNNING, ENDING)),
        RoundOver: (moves.on_round_over, (REFORMING, RUNNING)),
        RoundFailed: (moves.on_round_failed, (ENDING,)),
    },
    BARRIER: {
        BarrierDone: (moves.on_barrier_done, (DONE, BARRIER)),
        PeerFailed: (moves.on_peer_failed, (JOINING, BARRIER, DONE)),
        Signal: (moves.on_signal, (DONE,)),
        RoundOver: (moves.on_round_over, (JOINING, BARRIER)),
        RoundFailed: (moves.on_round_failed, (DONE,)),
    },
    ENDING: {
        Stopped: (moves.on_stopped, (DONE,)),
        PeerFailed: (moves.on_peer_failed_late, (ENDING,)),
        Signal: (moves.on_signal, (ENDING,)),
        RoundOver: (moves.on_round_over, (ENDING,)),
    },
    DONE: {},
}

_WATCHDOGS = frozenset[type[Any]]({Hang, Uninterruptible, Tick, BarrierDone})
"""Posted by other threads, which may be a moment behind the owner."""
_EXITS = frozenset[type[Any]]({Started, StartFailed, WorkerFailed, AllSucceeded})
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
    BARRIER: (_WATCHDOGS - {BarrierDone}) | {Started, MembershipChanged},
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
            raise IllegalMove(moves.complaint(state, event, "is not possible"))
        return Step(state, (), f"{kind.__name__} in {phase.value}: it no longer matters")
    handler, targets = move
    after, commands, reason = handler(state, event, now, policy)
    if after.phase not in targets:
        what = f"led to {after.phase.value}, which the table does not allow"
        raise IllegalMove(moves.complaint(state, event, what))
    line = f"{now:.3f} {phase.value} --{kind.__name__}--> {after.phase.value}: {reason}"
    return Step(after.replace(recent=(*after.recent, line)[-_HISTORY:]), commands, reason)


def diagram() -> str:
    """The table as Markdown: a Mermaid state diagram, then every phase with what each event leads to."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> NEW"]
    for phase, row in MOVES.items():
        edges: dict[Phase, list[str]] = {}
        for kind, (_, targets) in row.items():
            for target in targets:
                if target is not phase:  # the table below tells who may stay; arrows to oneself only clutter
                    edges.setdefault(target, []).append(kind.__name__)
        for target, names in edges.items():
            lines.append(f"    {phase.value} --> {target.value} : {', '.join(names)}")
    lines += ["    DONE --> [*]", "```", ""]
    lines += ["| phase | meaning | event | leads to |", "|---|---|---|---|"]
    for phase, row in MOVES.items():
        label, meaning = phase.value, MEANING[phase]
        for kind, (_, targets) in row.items():
            where = ", ".join("stays" if target is phase else target.value for target in targets)
            lines.append(f"| {label} | {meaning} | {kind.__name__} | {where} |")
            label = meaning = ""
        if not row:
            lines.append(f"| {label} | {meaning} | | |")
    return "\n".join(lines) + "\n"
