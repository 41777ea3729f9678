"""How a group of workers is stopped, as a table: what is done, for how long, and what follows.

    ASKED ──► ZYGOTE_KILLED ──► HELPERS_KILLED ──► ORPHANED ──► GIVEN_UP         in the agent
      └──► BYPASSED ──┘
    SIGNALLED ──► KILLED ──► GIVEN_UP                                            in the zygote

The zygote is the workers' parent: it signals them, and kills what is left after the grace. The agent asks it
to do so and takes over if it does not respond: first the agent signals the workers itself, so that they have
their grace; then the zygote is killed, and the workers with it. Both use this table, each its own rows.

The rules:

- A second request only shortens the grace. A stop cannot be called off.
- While workers run, the zygote must show a sign of life soon after a request. Without workers, only the
  deadline of the stage counts.
- A start that is not answered has run nothing of the user's, or only just: there is no grace, the zygote is
  killed.
- A recall is a stop that workers may outlive: those that re-enter have until `park_by`.
- A process that outlives SIGKILL is in uninterruptible sleep. It is given up after a while, and named.

Each function that moves a stop on returns it with the actions that are due now.
"""

from __future__ import annotations

from phalanx.core.record import Record

# Texts, not an enumeration: the zygote imports nothing that it can do without.
ASKED, BYPASSED, ZYGOTE_KILLED, HELPERS_KILLED = "ASKED", "BYPASSED", "ZYGOTE_KILLED", "HELPERS_KILLED"
ORPHANED, SIGNALLED, KILLED, GIVEN_UP = "ORPHANED", "SIGNALLED", "KILLED", "GIVEN_UP"

ASK = "ask"  # the zygote for a stop
SIGNAL = "signal"  # the workers, with the signal of the stop
KILL = "kill"  # the workers, and what they have left behind
KILL_ZYGOTE = "kill zygote"  # by the keeper
KILL_HELPERS = "kill helpers"  # keeper, zygote and workers
NAME = "name"  # what cannot be killed

SIGN_OF_LIFE = 1.0  # for a zygote to confirm a stop, or to answer a start
ANSWER = 7.0  # over the grace: the zygote answers before that, or it is not going to
CLEARED = 2.0  # for the keeper to kill the zygote, and for SIGKILL to end both
UNKILLABLE = 5.0  # a process that survives SIGKILL for this long is in uninterruptible sleep
NEVER = float("inf")


class Row(Record):
    """One stage: what is done on entry, the seconds until the next one, and that one."""

    action: str
    lasts: float
    then: str = GIVEN_UP
    of_grace: bool = False
    """The seconds count from the end of the grace, else from the entry."""
    repeats: bool = False
    """The action is due again whenever somebody looks: processes are still being adopted."""


TABLE = {
    ASKED: Row(ASK, ANSWER, ZYGOTE_KILLED, of_grace=True),
    BYPASSED: Row(SIGNAL, 0.0, ZYGOTE_KILLED, of_grace=True),
    ZYGOTE_KILLED: Row(KILL_ZYGOTE, CLEARED, HELPERS_KILLED),
    HELPERS_KILLED: Row(KILL_HELPERS, CLEARED, ORPHANED),
    ORPHANED: Row(KILL, UNKILLABLE, repeats=True),
    SIGNALLED: Row(SIGNAL, 0.0, KILLED, of_grace=True),
    KILLED: Row(KILL, UNKILLABLE, repeats=True),
    GIVEN_UP: Row(NAME, NEVER),
}


class Stop(Record):
    """A stop that is under way; made by the functions below only."""

    stage: str
    sig: int
    kill_at: float
    """The end of the grace."""
    due: float
    """The end of the stage."""
    park_by: float = 0.0
    """Until then, workers that were recalled may park."""
    sign_by: float = NEVER
    """Until then, the zygote must have shown a sign of life."""
    cleared: bool = False
    """The zygote was killed because of this stop."""


Step = tuple[Stop, tuple[str, ...]]


def _enter(stop: Stop, stage: str, now: float) -> Step:
    row = TABLE[stage]
    due = (stop.kill_at if row.of_grace else max(now, stop.park_by)) + row.lasts
    cleared = stop.cleared or stage == ZYGOTE_KILLED
    return stop.replace(stage=stage, due=due, sign_by=NEVER, cleared=cleared), (row.action,)


def signal_workers(now: float, sig: int, grace: float, patience: float = 0.0) -> Step:
    """In the zygote: begin a stop. `patience`: seconds for workers that are recalled."""
    return _enter(Stop(SIGNALLED, sig, now + grace, 0.0, now + patience), SIGNALLED, now)


def hurry(stop: Stop, now: float, grace: float) -> Stop:
    """In the zygote: a second request. Nothing parks any more."""
    kill_at = min(stop.kill_at, now + grace)
    return stop.replace(kill_at=kill_at, park_by=0.0, due=min(stop.due, kill_at + TABLE[stop.stage].lasts))


def ask(stop: Stop | None, now: float, sig: int, grace: float, runs: bool, answered: bool = True) -> Step:
    """In the agent: begin a stop, or hurry one. `runs`: a worker is known to; `answered`: the start is."""
    kill_at = now + grace if stop is None else min(stop.kill_at, now + grace)
    asked = (stop or Stop(ASKED, sig, kill_at, 0.0)).replace(sig=sig, kill_at=kill_at)
    if asked.stage == BYPASSED:
        return _enter(asked, BYPASSED, now)[0], (ASK, SIGNAL)
    if asked.stage != ASKED:
        return asked, (ASK,)
    if not answered:
        return asked.replace(due=now + SIGN_OF_LIFE), (ASK,)
    return asked.replace(due=kill_at + ANSWER, sign_by=now + SIGN_OF_LIFE if runs else NEVER), (ASK,)


def answer(stop: Stop, now: float) -> Stop:
    """In the agent: the start is answered after a stop was asked for. From here on the grace counts.

    The zygote may have been stopped after this answer, so that a sign of life is due from here on, too."""
    if stop.stage != ASKED:
        return stop
    return stop.replace(due=stop.kill_at + ANSWER, sign_by=now + SIGN_OF_LIFE)


def respond(stop: Stop) -> Stop:
    """In the agent: the zygote has shown a sign of life."""
    return stop.replace(sign_by=NEVER)


def kill_zygote(stop: Stop | None, now: float) -> Step:
    """In the agent: the zygote does not do what it should, or cannot answer now."""
    return _enter(stop or Stop(ZYGOTE_KILLED, 0, now, 0.0), ZYGOTE_KILLED, now)


def lose_helpers(stop: Stop | None, now: float) -> Step:
    """In the agent: keeper and zygote are gone, and workers are left."""
    return _enter(stop or Stop(ORPHANED, 0, now, 0.0), ORPHANED, now)


def tick(stop: Stop, now: float, runs: bool = True, reachable: bool = True) -> Step:
    """Time has passed. `runs`: a worker does; `reachable`: it can be signalled without the zygote."""
    if now >= stop.due or (stop.stage == BYPASSED and not runs):
        return _enter(stop, TABLE[stop.stage].then, now)
    if now >= stop.sign_by:
        if now >= stop.kill_at:
            return _enter(stop, ZYGOTE_KILLED, now)
        if reachable:
            return _enter(stop, BYPASSED, now)
        return stop.replace(sign_by=NEVER), ()
    row = TABLE[stop.stage]
    return stop, (row.action,) if row.repeats else ()


def deadline(stop: Stop) -> float:
    """When `tick` has something to do at the latest, apart from what repeats."""
    return min(stop.due, stop.sign_by)
