"""The pure parts of re-entry: who survived, which error only tells of a lost peer, and what travels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx import worker
from phalanx.agent.workers.worker_group import ReentryTerms
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.worker.reentry.recall_watch import Reentry, has_reentry
from phalanx.worker.reentry.reenter import ReentryHooks, lost_peer
from phalanx.worker.reentry.takeover import ReentryPlace
from phalanx.worker.reentry.worker_round import WorkerRound, compare


@pytest.mark.parametrize(
    ("befores", "expected"),
    [
        ([None, None], ((), (0, 1), ())),
        ([(1, 0, 3), None, (1, 2, 3)], ((0, 2), (1,), (1,))),
        ([(1, 2, 3), (1, 0, 3)], ((0, 1), (), (1,))),  # the world has shrunk, and ranks have changed
        ([(2, 0, 1), None], ((0,), (1,), ())),  # it has grown
        ([(2, 1, 2), (1, 0, 4)], ((0, 1), (), (0,))),  # the second was parked for longer than a round
    ],
)
def test_who_survived(befores: list[tuple[int, int, int] | None], expected: tuple[object, ...]) -> None:
    assert compare(befores) == expected


def chained(first: BaseException, then: BaseException) -> BaseException:
    then.__context__ = first
    return then


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (EOFError(), True),
        (ValueError("its own"), False),
        (chained(ConnectionResetError(104, "Connection reset by peer"), ValueError("wrapped")), True),
        (chained(ValueError("its own"), ConnectionResetError(104, "Connection reset by peer")), False),
        (KeyboardInterrupt(), False),
        (SystemExit(1), False),
    ],
)
def test_errors_that_only_tell_of_a_lost_peer(
    error: BaseException, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_peer(error, WorkerRound()) is lost
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not lost_peer(error, WorkerRound())


def test_a_reentry_is_found_behind_what_followed_it() -> None:
    assert has_reentry(Reentry())
    assert has_reentry(chained(Reentry(), SystemExit(1)))
    assert not has_reentry(chained(ValueError(), SystemExit(1)))
    assert not has_reentry(None)
    assert not issubclass(worker.Reentry, Exception)


def test_what_travels_in_the_variable(tmp_path: Path) -> None:
    terms = ReentryTerms(2.5, 7, "rank 3: exit code 1,\nand more").text()
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    try:
        file = os.fstat(fd)
        place = ReentryPlace(f"{fd},{file.st_dev},{file.st_ino},box={fd}:{file.st_ino};gone={fd}:1,{terms}")
        assert (place.timeout, place.number, place.cause) == (2.5, 7, "rank 3: exit code 1, and more")
        assert place.known == {"box": fd}
        assert ReentryPlace(place.text("1,8,")).number == 8
        with pytest.raises(ValueError, match="another file"):
            ReentryPlace(f"{fd},{file.st_dev},1,box={fd}:1,{terms}")
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("hooks", "why"),
    [
        (ReentryHooks(None, None, None), ""),
        (ReentryHooks(None, [lambda: False], [lambda: True, lambda: None]), ""),
        (ReentryHooks(None, None, lambda: False), "check <lambda> failed"),
        (ReentryHooks(None, None, lambda: 1 // 0), "check: ZeroDivisionError"),
        (ReentryHooks(None, lambda: 1 // 0, None), "finalize hook: ZeroDivisionError"),
    ],
)
def test_hooks(hooks: ReentryHooks, why: str) -> None:
    assert hooks.unfit().startswith(why)
    assert bool(hooks.unfit()) == bool(why)


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="abort=7"):
        worker.reenter(abort=7)
    with pytest.raises(TypeError, match="finalize=7"):
        worker.reenter(finalize=[7])
    with pytest.raises(TypeError, match="decorate a function"):
        worker.reenter(7)


def test_a_failure_tells_the_other_nodes_which_ranks_and_whether_all_are_new() -> None:
    failure = NodeFailure("rank 3 hangs", anew=True, ranks=(3, 5))
    assert NodeFailure.read(failure.text()) == failure
    for damaged in ('{"summary": "x", "ranks": ["a"]}', '{"summary": "x", "ranks": 7}', '{"anew": 1}'):
        assert NodeFailure.read(damaged).ranks == ()
