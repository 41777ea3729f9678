"""Whether the workers of a group make progress, and which rank blocks the others.

`judge(view, now, policy)` decides whether the group hangs and why; `next_look` is the next time at which that
can change. Both are pure: a `View` is what the agent observed, `now` is an argument. The rules, in order (the
first that holds is the verdict):

1. *expires*: a rank is past a deadline that it set itself.
2. *startup*: a rank has neither called `ready()` nor sent a heartbeat within `startup_timeout` of its start.
3. *heartbeat*: a rank has sent no heartbeat for `heartbeat_timeout`. The rule applies from a rank's first
   heartbeat on: how long a start may take is unrelated to how long a step may.
4. *partial exit*: a rank has succeeded, and others still run after `partial_exit_timeout`.
5. *silence*: no rank has written output for `silence_timeout`.
6. *value*: a rank printed nan or infinity where the expected pattern has its value (`expect_finite`).
7. *expect*: no line matched the expected pattern for `expect_every`.
8. *collectives*: ranks wait in collectives, and for `hang_timeout` no rank has entered or left one, and none
   has used a processor outside of one. `why_not_hung` has the reason where only the first half holds.

Which rank caused the hang is a separate question, because in a hung collective all ranks fall silent at once:
see `blame`.
"""

from __future__ import annotations

from phalanx.core.record import Record


class WatchPolicy(Record):
    """The timeouts of a job; None disables the rule."""

    heartbeat_timeout: float | None = None
    silence_timeout: float | None = None
    startup_timeout: float | None = None
    partial_exit_timeout: float | None = None
    on_hang: str = "restart"
    """restart, fail or warn."""
    expect: str = ""
    """A pattern in the output of the workers; the next two fields are about it."""
    expect_every: float | None = None
    expect_finite: bool = False
    hang_timeout: float | None = None
    """Of the collectives."""


class Beat(Record):
    """The state of one live rank; times are 0.0 if unknown."""

    rank: int
    beat_at: float = 0.0
    step: int | None = None
    count: int = 0
    ready_at: float = 0.0
    deadline: float = 0.0
    section: str = ""
    waits: bool = False
    """It is inside a collective."""
    numbers_at: float = 0.0
    """When it last entered or left a collective."""
    ran_at: float = 0.0
    """When it last used a processor outside of a collective."""


class View(Record):
    """A group at one moment."""

    started_at: float
    alive: tuple[Beat, ...]
    finished: tuple[int, ...] = ()
    first_exit: float = 0.0
    """When the first rank succeeded while others still ran."""
    output_at: float | None = None
    """When any rank last wrote output; None if unknown."""
    matched_at: float | None = None
    """When a line last matched the expected pattern, or the watch for it began; None if it has not begun."""
    bad_value: tuple[int, str] | None = None
    """The rank that printed a value that is not finite, and its line."""
    progress_elsewhere: float = 0.0
    """When ranks of other nodes last progressed, by their own samples; 0.0: not asked."""


class Verdict(Record):
    """A hang: the rule that detected it, the ranks, and the reason as text."""

    rule: str
    ranks: tuple[int, ...]
    reason: str


def judge(view: View, now: float, policy: WatchPolicy) -> Verdict | None:
    """The verdict of the first rule that holds, or None."""
    if not view.alive:
        return None
    expired = [beat for beat in view.alive if 0.0 < beat.deadline <= now]
    if expired:
        late = now - min(beat.deadline for beat in expired)
        return _verdict("expires", expired, f"{{}} did not leave expires() in time ({late:.1f} s late)")
    limit = policy.startup_timeout
    if limit is not None and now >= view.started_at + limit:
        slow = [beat for beat in view.alive if not beat.ready_at and not beat.count]
        if slow:
            return _verdict("startup", slow, f"{{}} not ready {limit:g} s after the start")
    limit = policy.heartbeat_timeout
    if limit is not None and any(beat.count and now >= beat.beat_at + limit for beat in view.alive):
        # Ranks that hang together reach the timeout at slightly different times: name all past half of it.
        quiet = [beat for beat in view.alive if beat.count and now >= beat.beat_at + limit / 2]
        longest = now - min(beat.beat_at for beat in quiet)
        return _verdict("heartbeat", quiet, f"no heartbeat from {{}} for {longest:.1f} s{_steps(quiet)}")
    limit = policy.partial_exit_timeout
    if limit is not None and view.first_exit and now >= view.first_exit + limit:
        done = ranks_text(view.finished)
        verb = "has" if len(view.finished) == 1 else "have"
        running = "runs" if len(view.alive) == 1 else "run"
        text = f"{{}} still {running} {now - view.first_exit:.1f} s after {done} {verb} finished"
        return _verdict("partial exit", view.alive, text)
    limit = policy.silence_timeout
    if limit is not None and view.output_at is not None and now >= view.output_at + limit:
        return _verdict("silence", view.alive, f"no output from {{}} for {now - view.output_at:.1f} s")
    if policy.expect_finite and view.bad_value is not None:
        rank, line = view.bad_value
        return Verdict("value", (rank,), f"{ranks_text((rank,))} printed a value that is not finite: {line}")
    limit = policy.expect_every
    if limit is not None and view.matched_at is not None and now >= view.matched_at + limit:
        ranks, silent = tuple(beat.rank for beat in view.alive), now - view.matched_at
        text = f"no line of {ranks_text(ranks)} matched {policy.expect!r} for {silent:.1f} s"
        return Verdict("expect", ranks, text)
    limit, last = policy.hang_timeout, last_progress(view)
    if limit is not None and last and now >= last + limit and any(beat.waits for beat in view.alive):
        return _verdict(
            "collectives", view.alive, f"no collective of {{}} has progressed for {now - last:.1f} s"
        )
    return None


def is_finite(text: str) -> bool:
    """Whether a value as a program prints it is finite; text without a number counts as finite.

    `tensor(nan, device='cuda:0')` is not a number for Python, but has one that is not finite.
    """
    try:
        value = float(text.strip().rstrip(",;)]}"))
    except ValueError:
        words = "".join(c if c.isalpha() or c == "_" else " " for c in text.lower()).split()
        return not {"nan", "inf", "infinity"} & set(words)
    return value - value == 0.0


def why_not_hung(view: View, now: float, policy: WatchPolicy) -> str:
    """Why a group whose collectives have not progressed for `hang_timeout` does not hang; empty: it does."""
    limit, numbers_at = policy.hang_timeout, max((beat.numbers_at for beat in view.alive), default=0.0)
    if limit is None or not numbers_at or now < numbers_at + limit:
        return ""
    waiting = tuple(beat.rank for beat in view.alive if beat.waits)
    still = f"no collective has progressed for {now - numbers_at:.0f} s"
    if not waiting:
        return f"{still}, and no rank waits in one; not a hang"
    running = tuple(beat.rank for beat in view.alive if beat.ran_at and now < beat.ran_at + limit)
    if not running:
        return ""
    wait = "waits" if len(waiting) == 1 else "wait"
    run = "is running" if len(running) == 1 else "are running"
    who = f"{ranks_text(waiting)} {wait} in one, and {ranks_text(running)} {run} outside of it"
    return f"{still}: {who}; not a hang"


def last_progress(view: View) -> float:
    """When a rank last entered or left a collective, or ran outside of one; 0.0: not known."""
    times = [max(beat.numbers_at, beat.ran_at) for beat in view.alive]
    return max([view.progress_elsewhere, *times])


def next_look(view: View, policy: WatchPolicy) -> float | None:
    """The earliest time at which `judge` can find a hang if nothing changes until then."""
    times = [beat.deadline for beat in view.alive if beat.deadline > 0]
    if policy.startup_timeout is not None and any(not b.ready_at and not b.count for b in view.alive):
        times.append(view.started_at + policy.startup_timeout)
    if policy.heartbeat_timeout is not None:
        times += [beat.beat_at + policy.heartbeat_timeout for beat in view.alive if beat.count]
    if policy.partial_exit_timeout is not None and view.first_exit:
        times.append(view.first_exit + policy.partial_exit_timeout)
    if policy.silence_timeout is not None and view.output_at is not None:
        times.append(view.output_at + policy.silence_timeout)
    if policy.expect_every is not None and view.matched_at is not None:
        times.append(view.matched_at + policy.expect_every)
    last = last_progress(view)
    if policy.hang_timeout is not None and last and any(beat.waits for beat in view.alive):
        times.append(last + policy.hang_timeout)
    return min(times, default=None)


def _verdict(rule: str, beats: list[Beat] | tuple[Beat, ...], text: str) -> Verdict:
    ranks = tuple(beat.rank for beat in beats)
    return Verdict(rule, ranks, text.format(ranks_text(ranks)))


def _steps(beats: list[Beat]) -> str:
    steps = sorted({beat.step for beat in beats if beat.step is not None})
    if not steps:
        return ""
    return f" (last at step {steps[0]})" if len(steps) == 1 else f" (last at steps {steps[0]} to {steps[-1]})"


# ---- the rank that blocks the others -----------------------------------------------------------------


class Evidence(Record):
    """What was collected about one rank of a hung group."""

    rank: int
    stack: tuple[str, ...] = ()
    """Innermost first; empty if the rank did not answer."""
    stopped: bool = False
    """Stopped by a signal or a debugger."""
    waiting: bool = False
    """In a call that waits for other ranks (a collective)."""


class Blame(Record):
    """The ranks to look at first, and why."""

    ranks: tuple[int, ...]
    reason: str


def blame(view: View, verdict: Verdict, evidence: tuple[Evidence, ...]) -> Blame:
    """The ranks that differ from the others of a verdict; all of them if none differs."""
    suspects = [one for one in evidence if one.rank in verdict.ranks] or list(evidence)
    all_of_them = Blame(tuple(one.rank for one in suspects) or verdict.ranks, "")
    stopped = tuple(one.rank for one in evidence if one.stopped)
    if stopped:
        return Blame(stopped, "stopped by a signal")
    if len(suspects) < 2:
        return all_of_them
    busy = tuple(one.rank for one in suspects if not one.waiting)
    if busy and len(busy) < len(suspects):
        return Blame(busy, "the others wait for it" if len(busy) == 1 else "the others wait for them")
    behind = _behind(view, all_of_them.ranks)
    if behind:
        return Blame(behind, "behind the others")
    groups = alike(tuple(suspects))
    if len(groups) > 1 and len(groups[0]) < len(groups[-1]):
        return Blame(groups[0], "its stack differs from the others'")
    return all_of_them


def _behind(view: View, ranks: tuple[int, ...]) -> tuple[int, ...]:
    steps = {beat.rank: beat.step for beat in view.alive if beat.rank in ranks and beat.step is not None}
    lowest = min(steps.values(), default=0)
    found = tuple(sorted(rank for rank, step in steps.items() if step == lowest))
    return found if len(steps) == len(ranks) and len(found) < len(steps) else ()


def alike(evidence: tuple[Evidence, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks grouped by identical stacks, the smallest groups first."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for one in sorted(evidence, key=lambda one: one.rank):
        groups.setdefault(one.stack, []).append(one.rank)
    return tuple(tuple(ranks) for ranks in sorted(groups.values(), key=lambda ranks: (len(ranks), ranks)))


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    from phalanx.core.diagnosis.failures import ranks_text as text

    return text(ranks)
