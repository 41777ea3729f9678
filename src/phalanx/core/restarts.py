"""Whether a failed group is started again, and how soon.

The rules, in the order in which they are asked:

1. An exit code named in `no_restart_on` is final: its owner knows that a retry cannot help.
2. *Fail fast*: the same error twice in a row, both times before the worker was ready, is final. This
   rule is off unless the job reports readiness (`readiness=True`). Without that, "ready"
   is only a guess from how long a worker lived, and a plain `--max-restarts 3` job whose script dies
   at once must get the three restarts it asked for: people rely on them to ride out a port that is
   still taken or a file system that is still mounting. A guess may not take that away.
3. The budget: `max_restarts` for the whole job; with a `window`, only failures of the last `window`
   seconds count, so that a job of many days is not ended by one failure a day.
4. Back-off: a worker that dies within `healthy_after` seconds of its start makes a crash loop one
   longer; one that lived longer resets it. The first `free` failures of a loop restart at once
   (a normal restart must not wait); after that the delay doubles from `backoff_first` to `backoff_max`.

Membership changes, preemption and signals never come here: they cost nothing.

`History.attempt` is the job-wide number of restarts used, which every node agrees on because it
travels with each round and each failure report. `History.failures` is what this node saw itself; it is
only used for the window, the back-off and fail fast. A node that came late counts old failures in
`attempt` but not in its window; taking them as fresh instead was rejected, because it would let a
newcomer end a healthy job. The list is bounded, so a loop of any length costs no memory.
"""

from __future__ import annotations

from phalanx.core.record import Record

_KEEP = 32
"""Failures remembered beyond the budget: enough for any back-off to have reached its ceiling."""


class RestartPolicy(Record):
    """What the job's owner allows."""

    max_restarts: int = 3
    window: float | None = None
    no_restart_on: frozenset[int] = frozenset()
    readiness: bool = False
    ready_after: float = 5.0
    healthy_after: float = 10.0
    free: int = 5
    backoff_first: float = 0.1
    backoff_factor: float = 2.0
    backoff_max: float = 5.0


class Failure(Record):
    """One incident as the policy sees it; `lived` is the time from the start of the workers to it."""

    at: float
    error: str = ""
    exit_code: int | None = None
    lived: float = 0.0
    ready: bool | None = None


class History(Record):
    """Restarts used by the job, and the latest failures seen by this node, oldest first."""

    attempt: int = 0
    failures: tuple[Failure, ...] = ()


class Decision(Record):
    """The verdict: `remaining` is what is left of the budget after it."""

    restart: bool
    delay: float
    remaining: int
    reason: str


def check(policy: RestartPolicy) -> RestartPolicy:
    """The policy itself, or ValueError naming the value that makes no sense."""
    if policy.max_restarts < 0:
        raise ValueError(f"max_restarts={policy.max_restarts}: use 0 for no restarts, or more")
    if policy.window is not None and policy.window <= 0:
        raise ValueError(
            f"window={policy.window}: use a number of seconds above 0, or None for the whole job"
        )
    if policy.backoff_first < 0 or policy.backoff_max < 0 or policy.backoff_factor < 1:
        raise ValueError(
            f"back-off {policy.backoff_first} s x {policy.backoff_factor} up to {policy.backoff_max} s: "
            "times must not be negative and the factor must be at least 1"
        )
    return policy


def was_ready(failure: Failure, policy: RestartPolicy) -> bool:
    """What the worker reported, or else whether it lived long enough to have got going."""
    return failure.lived >= policy.ready_after if failure.ready is None else failure.ready


def remaining(history: History, now: float, policy: RestartPolicy) -> int:
    """How many restarts are left."""
    return max(0, policy.max_restarts - used(history, now, policy))


def used(history: History, now: float, policy: RestartPolicy) -> int:
    """How much of the budget counts as spent now."""
    if policy.window is None:
        return history.attempt
    return sum(failure.at > now - policy.window for failure in history.failures)


def backoff(history: History, failure: Failure, policy: RestartPolicy) -> float:
    """Seconds to wait before the restart; 0 unless this is a crash loop."""
    if failure.lived >= policy.healthy_after:
        return 0.0
    loop = 1
    for earlier in reversed(history.failures):
        if earlier.lived >= policy.healthy_after:
            break
        loop += 1
    doublings = loop - policy.free - 1
    if doublings < 0:
        return 0.0
    return min(policy.backoff_max, policy.backoff_first * policy.backoff_factor ** min(doublings, _KEEP))


def decide(history: History, failure: Failure, now: float, policy: RestartPolicy) -> Decision:
    """The verdict on one failure; `history` does not hold it yet (see `record`)."""
    spent = used(history, now, policy)
    left = remaining(history, now, policy)
    within = "" if policy.window is None else f" within {policy.window:g} s"
    if failure.exit_code is not None and failure.exit_code in policy.no_restart_on:
        reason = f"not restarted: exit code {failure.exit_code} is listed as not worth a restart"
        return Decision(False, 0.0, left, reason)
    last = history.failures[-1] if history.failures else None
    if (
        policy.readiness
        and last is not None
        and failure.error == last.error
        and not was_ready(failure, policy)
        and not was_ready(last, policy)
    ):
        reason = "not restarted: the same error twice in a row, both times before the worker was ready"
        return Decision(False, 0.0, left, reason)
    if policy.max_restarts == 0:
        return Decision(False, 0.0, 0, "not restarted: no restarts are allowed (max_restarts is 0)")
    if left == 0:
        reason = f"not restarted: {policy.max_restarts} of {policy.max_restarts} restarts are used{within}"
        return Decision(False, 0.0, 0, reason)
    delay = backoff(history, failure, policy)
    reason = f"restart {spent + 1} of {policy.max_restarts}{within}"
    if delay:
        reason += f", after {delay:g} s because the workers keep dying soon after their start"
    return Decision(True, delay, left - 1, reason)


def record(history: History, failure: Failure, policy: RestartPolicy, attempt: int | None = None) -> History:
    """The history once `failure` has used a restart; `attempt`: the job's count, from another node."""
    known = history.attempt + 1 if attempt is None else max(history.attempt, attempt)
    keep = max(_KEEP, policy.max_restarts + 1 if policy.window is not None else 0)
    return History(known, (*history.failures, failure)[-keep:])


def decide_for_job(used: int, max_restarts: int | None) -> Decision:
    """The leader's verdict on a failed round of a job that has used so many restarts.

    Without a limit the nodes judge by themselves: only they know when the failures of a window happened.
    """
    if max_restarts is None:
        return Decision(True, 0.0, 0, "restarted")
    return decide(History(used), Failure(0.0), 0.0, RestartPolicy(max_restarts))
