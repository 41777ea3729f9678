"""The rest of a group after its first failure: told by the helpers themselves, or on the owner's word."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from phalanx.agent.warm.spawner import Spawner
from phalanx.agent.workers.worker_group import GroupOptions
from phalanx.core.group.events import SiblingStop
from phalanx.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext
from phalanx.helpers.messages import Exit, GroupStopped, WorkerLaunch
from tests.conftest import HUNG, wait_until
from tests.support.run_helpers import zygote_below

# Ends well when it is let go, and says so when it was told to stop before that.
# What waits is a process of its own, and ready only when it has its own way with signals.
STAYS = (
    "trap 'echo told > {at}/told; exit 9' TERM; "
    "{{ touch {at}/ready; read word < {at}/gate; }} & wait $!; exit 0"
)
FAILS = "until [ -e {at}/ready ]; do sleep 0.01; done; exit {code}"


def group(at: Path, code: int, *, stops_at_failure: bool) -> SubprocessContext:
    """Rank 0 ends with `code` once rank 1, which stays, is ready."""
    os.mkfifo(at / "gate")
    made = SubprocessContext(
        name="g",
        entrypoint="/bin/sh",
        args={0: ("-c", FAILS.format(at=at, code=code)), 1: ("-c", STAYS.format(at=at))},
        envs={0: {}, 1: {}},
        logs_specs=DefaultLogsSpecs(),
        options=GroupOptions(at_failure=SiblingStop(by_helpers=stops_at_failure)),
    )
    made.start()
    return made


def let_go(at: Path) -> None:
    with open(at / "gate", "r+b", buffering=0) as gate:  # to read as well: nobody needs to be there for it
        gate.write(b"go\n")
        wait_until(lambda: not select.select([gate], [], [], 0)[0], "somebody takes the word")


def heard(made: SubprocessContext) -> None:
    """Wait until the helpers have something to tell; what, is not looked at."""
    assert select.select([fd for fd, _ in made.fds()], [], [], HUNG)[0], "no exit was told"


def test_the_others_are_told_without_the_owners_word(tmp_path: Path) -> None:
    with group(tmp_path, 3, stops_at_failure=True) as made:
        wait_until((tmp_path / "told").exists, "the other one was told")  # nobody has called wait or poll
        result = made.wait(HUNG)
    assert result is not None
    assert (set(result.failures), set(result.stopped)) == ({0}, {1})
    assert result.failures[0].exitcode == 3
    assert result.stopped[1].is_victim


def test_who_leaves_with_success_stops_nobody(tmp_path: Path) -> None:
    with group(tmp_path, 0, stops_at_failure=True) as made:
        heard(made)
        assert made.wait(0) is None
        let_go(tmp_path)
        result = made.wait(HUNG)
    assert result is not None
    assert not result.is_failed()
    assert not (tmp_path / "told").exists()


def test_by_default_only_the_owner_stops_the_others(tmp_path: Path) -> None:
    with group(tmp_path, 3, stops_at_failure=False) as made:
        heard(made)
        let_go(tmp_path)
        wait_until(lambda: not psutil.pid_exists(made.pids()[1]), "the other one has ended by itself")
        result = made.wait(HUNG)
    assert result is not None
    assert (set(result.failures), set(result.stopped)) == ({0}, set())
    assert not (tmp_path / "told").exists()


def test_one_that_outstays_the_grace_is_killed(tmp_path: Path) -> None:
    stays = f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    made = SubprocessContext(
        name="g",
        entrypoint="/bin/sh",
        args={0: ("-c", FAILS.format(at=tmp_path, code=3)), 1: ("-c", stays)},
        envs={0: {}, 1: {}},
        logs_specs=DefaultLogsSpecs(),
        options=GroupOptions(at_failure=SiblingStop(grace=0.3, by_helpers=True)),
    )
    with made:
        made.start()
        wait_until(lambda: not psutil.pid_exists(made.pids()[1]), "the other one is gone")
        result = made.wait(HUNG)
    assert result is not None
    assert (set(result.failures), set(result.stopped)) == ({0}, {1})
    assert result.stopped[1].exitcode == -signal.SIGKILL


@pytest.mark.parametrize("said", ["stop", "nothing"])
def test_the_owners_word_goes_first(said: str, tmp_path: Path) -> None:
    """The helpers see a failure and a stop of the owner's own kind at once: that one is carried out."""
    os.mkfifo(tmp_path / "gate")
    spawner = Spawner()
    try:
        jobs = [
            WorkerLaunch(0, argv=["sleep", "1000"], path="/bin/sleep"),
            WorkerLaunch(1, argv=["sh", "-c", STAYS.format(at=tmp_path)], path="/bin/sh"),
        ]
        pids = spawner.spawn(jobs, os.environ, at_failure=(signal.SIGTERM, HUNG))
        wait_until((tmp_path / "ready").exists, "the other one is ready")
        zygote = zygote_below(spawner.pid)
        zygote.suspend()
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: psutil.Process(pids[0]).status() == psutil.STATUS_ZOMBIE, "it has failed")
        if said == "stop":
            spawner.stop(0, HUNG)  # they leave by themselves
        zygote.resume()
        if said == "nothing":
            wait_until((tmp_path / "told").exists, "without a word of the owner's it is told")
        else:
            wait_until(lambda: not psutil.pid_exists(pids[0]), "the failure was seen")
            let_go(tmp_path)
        codes: dict[int, int] = {}
        end = time.monotonic() + HUNG
        while True:
            events = spawner.events(HUNG)  # none, if it saw a worker's end before the zygote's word of it
            assert time.monotonic() < end, "no answer"
            codes.update({event.rank: event.code for event in events if isinstance(event, Exit)})
            if any(isinstance(event, GroupStopped) for event in events):
                break
        assert codes == {0: -signal.SIGKILL, 1: 0 if said == "stop" else 9}
    finally:
        spawner.close()


def pair(at: Path) -> list[WorkerLaunch]:
    """Rank 0 runs until it is killed, rank 1 stays."""
    at.mkdir()
    os.mkfifo(at / "gate")
    return [
        WorkerLaunch(0, argv=["sleep", "1000"], path="/bin/sleep"),
        WorkerLaunch(1, argv=["sh", "-c", STAYS.format(at=at)], path="/bin/sh"),
    ]


def ends(spawner: Spawner, codes: dict[int, int], until: type[Exit] | type[GroupStopped]) -> None:
    """Take in what happens up to the first event of a kind."""
    by = time.monotonic() + HUNG
    while True:
        events = spawner.events(HUNG)
        assert events or time.monotonic() < by, f"nothing more after {codes}"
        codes.update({event.rank: event.code for event in events if isinstance(event, Exit)})
        if any(isinstance(event, until) for event in events):
            return


def test_after_a_stop_of_the_owners_a_failure_stops_nobody(tmp_path: Path) -> None:
    spawner = Spawner()
    try:
        pids = spawner.spawn(pair(tmp_path / "a"), os.environ, at_failure=(signal.SIGTERM, HUNG))
        wait_until((tmp_path / "a/ready").exists, "the other one is ready")
        spawner.stop(0, HUNG)  # they leave by themselves
        spawner.signal(signal.SIGKILL, {0})  # heard after the stop: they travel in order
        codes: dict[int, int] = {}
        ends(spawner, codes, Exit)
        let_go(tmp_path / "a")
        ends(spawner, codes, GroupStopped)
        assert codes == {0: -signal.SIGKILL, 1: 0}
        assert not (tmp_path / "a/told").exists()
        assert not psutil.pid_exists(pids[1])
    finally:
        spawner.close()


@pytest.mark.parametrize("before", ["failure", "stop"])
def test_the_next_group_of_the_same_helpers_is_watched_again(before: str, tmp_path: Path) -> None:
    spawner = Spawner()
    try:
        for number, armed in enumerate((True, True, False)):
            at = tmp_path / str(number)
            at_failure = (signal.SIGTERM, HUNG) if armed else None
            pids = spawner.spawn(pair(at), os.environ, at_failure=at_failure)
            wait_until((at / "ready").exists, "the other one is ready")
            codes: dict[int, int] = {}
            if before == "stop" and number == 0:
                spawner.stop(signal.SIGTERM, HUNG)
                ends(spawner, codes, GroupStopped)
                continue
            os.kill(pids[0], signal.SIGKILL)
            if armed:
                ends(spawner, codes, GroupStopped)  # nobody has asked for it
                assert codes == {0: -signal.SIGKILL, 1: 9}, number
                continue
            ends(spawner, codes, Exit)
            let_go(at)
            spawner.stop(0, HUNG)
            ends(spawner, codes, GroupStopped)
            assert codes == {0: -signal.SIGKILL, 1: 0}
    finally:
        spawner.close()


IN_BETWEEN = """
import _socket, os, signal
from phalanx.helpers.channel import Channel
from phalanx.helpers.messages import StopGroup
from phalanx.helpers.zygote import ForkedWorker, Zygote
ours, theirs = _socket.socketpair()
keeper, zygotes = _socket.socketpair()
zygote = Zygote(Channel(theirs), zygotes.detach())
stays = os.fork()
if not stays:
    os.setsid(); signal.pause()
fails = os.fork()
if not fails:
    os._exit(3)
os.waitid(os.P_PID, fails, os.WEXITED | os.WNOWAIT)
zygote.workers = {pid: ForkedWorker(rank, pid) for rank, pid in enumerate((stays, fails))}
zygote.group, zygote.at_failure = 1, (signal.SIGTERM, 30.0)
zygote._stop(StopGroup(1, 0, 30.0))
assert zygote.stop.terms.sig == 0 and not zygote.workers[stays].signalled_at, "another stop than asked for"
os.kill(stays, signal.SIGKILL)
os.waitpid(stays, 0)
"""


def test_a_failure_in_the_very_moment_of_a_stop_does_not_replace_it() -> None:
    """No other process can hit this moment, hence from inside: it has failed, and the stop is just read."""
    done = subprocess.run([sys.executable, "-c", IN_BETWEEN], capture_output=True, timeout=HUNG, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
