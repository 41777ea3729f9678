"""Whether a failed group is started again, and how soon.

The rules, in the order in which they are asked:

1. A failure named in `no_restart_on`, by its exit code or by the name of its exception (or of a class that
   it derives from), is final: its owner knows that a retry cannot help. So is exit code 93, by which a
   worker says so itself.
2. A failure named in `hopeless` is final too, but only for a worker that made no progress and died within
   `hopeless_within` seconds. These are guesses (a missing module, a wrong argument), and a guess must not
   end a job that has been training for hours. An error of the operating system is never hopeless, whatever
   the exit code: a file system may come back.
3. The budget: `max_restarts` for the whole job; with a `window`, only failures of the last `window`
   seconds count, so that a job of many days is not ended by one failure a day.
4. *The same failure again*, with no progress in between, is not worth a third attempt, and the exit code is
   93. Two failures are the same if their signatures are (`core.diagnosis.failures.signature`); causes that
   may pass by themselves have none: a port that is still taken, a file system that is still mounting, a
   peer, a kill from outside, a bare exit code. There was no progress if both came at the same step, or both
   within `hopeless_within` seconds and the later one at no further step. A worker that reports no step and
   lives longer may have progressed, so this rule does not hold for it. Without a restart left the budget is
   the reason, and the exit code the worker's own.
5. The delay: `restart_delay` before every restart, and back-off in a crash loop. A failure belongs to a crash
   loop when it comes within `healthy_after` seconds of the start of its workers, and without progress: no
   step beyond those of the failures before it. The first failure of a loop restarts at once (a normal
   restart must not wait); the second waits for `backoff_first` seconds, and each further one for
   `backoff_factor` times as long, up to `backoff_max`. The last restart of the budget waits until
   `patience` seconds after the first failure of the loop: restarts take a fraction of a second here, and a
   budget of three would otherwise be gone before a name server or a mount has come back. A worker that was
   killed (SIGKILL) did not fail by itself: the first `free_kills` failures of a loop restart at once then,
   and the last restart is not delayed further.

Membership changes, preemption and signals never come here: they cost nothing.

`History.attempt` is the job-wide number of restarts used, which every node agrees on because it
travels with each round and each failure report. `History.failures` is what this node saw itself; it is
only used for the window, the back-off and the same failure. A node that came late counts old failures in
`attempt` but not in its window; taking them as fresh instead was rejected, because it would let a
newcomer end a healthy job. The list is bounded, so a loop of any length costs no memory.
"""

from __future__ import annotations

from phalanx.core.exit_codes import DO_NOT_RETRY, SIGNALED
from phalanx.core.record import Record

_KILLED = SIGNALED + 9
_KEEP = 32
"""Failures remembered beyond the budget: enough for any back-off to have reached its ceiling."""


class RestartPolicy(Record):
    """What the job's owner allows."""

    max_restarts: int = 3
    window: float | None = None
    no_restart_on: frozenset[int | str] = frozenset()
    hopeless: frozenset[int | str] = frozenset()
    hopeless_within: float = 60.0
    same_failure: bool = False
    """Whether the same failure again ends the job."""
    healthy_after: float = 10.0
    free: int = 1
    free_kills: int = 5
    restart_delay: float = 0.0
    backoff_first: float = 0.5
    backoff_factor: float = 2.0
    backoff_max: float = 30.0
    """0: no back-off."""
    patience: float = 0.0


class Failure(Record):
    """One incident as the policy sees it; `lived` is the time from the start of the workers to it.

    `kinds` are the names of the exception and of the classes that it derives from; `step` is the last one
    that the failed worker reported; `signature` identifies the failure, where it is known."""

    at: float
    error: str = ""
    exit_code: int | None = None
    lived: float = 0.0
    kinds: tuple[str, ...] = ()
    step: int | None = None
    signature: str = ""


class History(Record):
    """Restarts used by the job, and the latest failures seen by this node, oldest first."""

    attempt: int = 0
    failures: tuple[Failure, ...] = ()


class Decision(Record):
    """The verdict: `remaining` is what is left of the budget after it.

    `code`: the job's exit code, whatever that of the worker; 0: the worker's."""

    restart: bool
    delay: float
    remaining: int
    reason: str
    code: int = 0


def check(policy: RestartPolicy) -> RestartPolicy:
    """The policy itself, or ValueError naming the value that makes no sense."""
    if policy.max_restarts < 0:
        raise ValueError(f"max_restarts={policy.max_restarts}: use 0 for no restarts, or more")
    if policy.window is not None and policy.window <= 0:
        raise ValueError(
            f"window={policy.window}: use a number of seconds above 0, or None for the whole job"
        )
    if policy.restart_delay < 0:
        raise ValueError(f"restart_delay={policy.restart_delay}: use a number of seconds, 0 or more")
    if policy.backoff_first < 0 or policy.backoff_max < 0 or policy.backoff_factor < 1:
        raise ValueError(
            f"back-off {policy.backoff_first} s x {policy.backoff_factor} up to {policy.backoff_max} s: "
            "times must not be negative and the factor must be at least 1"
        )
    return policy


def remaining(history: History, now: float, policy: RestartPolicy) -> int:
    """How many restarts are left."""
    return max(0, policy.max_restarts - used(history, now, policy))


def used(history: History, now: float, policy: RestartPolicy) -> int:
    """How much of the budget counts as spent now."""
    if policy.window is None:
        return history.attempt
    return sum(failure.at > now - policy.window for failure in history.failures)


def backoff(history: History, failure: Failure, now: float, policy: RestartPolicy) -> float:
    """Seconds to wait before the restart because of a crash loop; 0 in none."""
    loop = crash_loop(history, failure, policy)
    killed = failure.exit_code == _KILLED
    doublings = len(loop) - (policy.free_kills if killed else policy.free) - 1
    if doublings < 0 or not policy.backoff_first or not policy.backoff_max:
        return 0.0
    delay = min(policy.backoff_max, policy.backoff_first * policy.backoff_factor ** min(doublings, _KEEP))
    if remaining(history, now, policy) == 1 and not killed:
        delay = max(delay, round(loop[0].at + policy.patience - now, 1))
    return delay


def crash_loop(history: History, failure: Failure, policy: RestartPolicy) -> list[Failure]:
    """The failures, oldest first and this one last, that followed each other without any progress."""
    loop: list[Failure] = []
    for one in (failure, *reversed(history.failures)):
        if one.lived >= policy.healthy_after:
            break
        if loop and loop[-1].step is not None and (one.step is None or loop[-1].step > one.step):
            break  # the later one had got further: the loop begins with it
        loop.append(one)
    return loop[::-1]


def _listed(failure: Failure, names: frozenset[int | str]) -> str:
    """How the list names this failure; empty: it does not."""
    if failure.exit_code is not None and failure.exit_code in names:
        return f"exit code {failure.exit_code}"
    return next((kind for kind in failure.kinds if kind in names), "")


def _final(failure: Failure, policy: RestartPolicy) -> str:
    """Why a restart cannot help, whatever budget is left; empty where it may."""
    if failure.exit_code == DO_NOT_RETRY:
        return f"not restarted: exit code {DO_NOT_RETRY} says 'do not retry'"
    listed = _listed(failure, policy.no_restart_on)
    if listed:
        return f"not restarted: {listed} is listed as not worth a restart"
    listed = _listed(failure, policy.hopeless)
    may_pass = failure.step is not None or "OSError" in failure.kinds
    if listed and failure.lived < policy.hopeless_within and not may_pass:
        return f"not restarted: {listed} would happen again (--no-restart-on none restarts it all the same)"
    return ""


def _same_again(history: History, failure: Failure, policy: RestartPolicy) -> bool:
    """Whether this failure is the last one again, with no progress in between."""
    last = history.failures[-1] if history.failures else None
    if last is None or not failure.signature or failure.signature != last.signature:
        return False
    if failure.step is not None and (last.step is None or failure.step > last.step):
        return False
    # The time between the failures, not the life of the later one: it covers rounds that ended otherwise.
    soon = max(last.lived, failure.at - last.at) < policy.hopeless_within
    return soon or (failure.step is not None and failure.step == last.step)


def decide(history: History, failure: Failure, now: float, policy: RestartPolicy) -> Decision:
    """The verdict on one failure; `history` does not hold it yet (see `record`)."""
    spent = used(history, now, policy)
    left = remaining(history, now, policy)
    within = "" if policy.window is None else f" within {policy.window:g} s"
    if policy.max_restarts == 0:
        return Decision(False, 0.0, 0, "not restarted: no restarts are allowed (max_restarts is 0)")
    final = _final(failure, policy)
    if final:
        return Decision(False, 0.0, left, final)
    if left == 0:
        reason = f"not restarted: {policy.max_restarts} of {policy.max_restarts} restarts are used{within}"
        return Decision(False, 0.0, 0, reason)
    if policy.same_failure and _same_again(history, failure, policy):
        reason = (
            f"not restarted: the same failure twice in a row without progress ({failure.signature}); "
            "--restart-always restarts it all the same"
        )
        return Decision(False, 0.0, left, reason, DO_NOT_RETRY)
    loop = backoff(history, failure, now, policy)
    delay = max(loop, policy.restart_delay)
    reason = f"restart {spent + 1} of {policy.max_restarts}{within}"
    if delay:
        reason += f", in {delay:g} s"
    if loop and loop == delay:
        reason += " because the workers keep failing soon after their start"
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
