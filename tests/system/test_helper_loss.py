"""Helpers that are killed while they serve no workers, or are stopped while they do: the job goes on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from phalanx.agent.spec import RunResult
from phalanx.agent.torch_agent import LocalElasticAgent
from phalanx.core.group_events import WorkerState
from phalanx.core.restarts import RestartPolicy
from phalanx.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from phalanx.warm.helper_pool import HelperPool
from tests.conftest import HUNG, gone, wait_until
from tests.system.test_faults import few_or_many
from tests.system.test_loop import Waiting, agent_of, is_in

VICTIMS = ["zygote", "keeper", "both"]


def helpers_in(pool: HelperPool) -> tuple[int, int]:
    """Keeper and zygote of a pool's current helpers, once they are up."""
    wait_until(lambda: pool.current is not None and not pool.current.lost, "helpers")
    assert pool.current is not None
    keeper = psutil.Process(pool.current.pid)
    wait_until(lambda: [c for c in keeper.children() if c.name().endswith("zygote")], "the zygote")
    return keeper.pid, keeper.children()[0].pid


def kill(pool: HelperPool, victims: str) -> None:
    keeper, zygote = helpers_in(pool)
    for name, pid in (("keeper", keeper), ("zygote", zygote)):
        if victims in (name, "both"):
            os.kill(pid, signal.SIGKILL)


def run_beside(agent: LocalElasticAgent, then: Callable[[], None]) -> RunResult:
    """Run the agent in this thread and the disturbance in another."""
    failed: list[BaseException] = []

    def disturb() -> None:
        try:
            then()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    result = agent.run()
    thread.join(HUNG)
    if failed:
        raise failed[0]
    return result


# ---- killed while idle ---------------------------------------------------------------------------------


@few_or_many
@pytest.mark.parametrize("kind", ["exec", "python"])
@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_while_joining(victims: str, kind: str, times: int, tmp_path: Path) -> None:
    """A spare, or a first node: helpers wait for a round that comes later."""
    for turn in range(max(1, times // 3)):
        handler, pool = Waiting(), HelperPool(kind)
        agent = agent_of("", tmp_path / str(turn), handler, helpers=pool)
        first = pool.current

        def disturb(pool: HelperPool = pool, handler: Waiting = handler) -> None:
            wait_until(is_in(agent, "JOINING"), "the rendezvous")  # noqa: B023 - called in this turn
            kill(pool, victims)
            wait_until(lambda: pool.current is not first, "the next helpers")  # noqa: B023
            handler.go.set()

        result = run_beside(agent, disturb)
        assert (result.state, agent.attempt) == (WorkerState.SUCCEEDED, 0)


@few_or_many
@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_between_a_failure_and_its_restart(victims: str, times: int, tmp_path: Path) -> None:
    policy = RestartPolicy(max_restarts=1, free=0, backoff_first=0.5)
    code = "import os, sys; sys.exit(1 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
    for turn in range(max(1, times // 3)):
        pool = HelperPool("exec")
        agent = agent_of(code, tmp_path / str(turn), helpers=pool, restart_policy=policy)

        def disturb(agent: LocalElasticAgent = agent, pool: HelperPool = pool) -> None:
            wait_until(is_in(agent, "WAITING"), "the back-off")
            kill(pool, victims)

        result = run_beside(agent, disturb)
        assert (result.state, agent.attempt) == (WorkerState.SUCCEEDED, 1)


@few_or_many
@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_just_before_the_start(victims: str, times: int, tmp_path: Path) -> None:
    """The loop has not seen it yet, or the request is on its way: at any moment of the start."""
    for turn in range(times):
        handler, pool = Waiting(), HelperPool("exec")
        agent = agent_of("import time; time.sleep(0.3)", tmp_path / str(turn), handler, helpers=pool)

        def disturb(agent: LocalElasticAgent = agent, pool: HelperPool = pool, let: Waiting = handler) -> None:
            wait_until(is_in(agent, "JOINING"), "the rendezvous")
            keeper, zygote = helpers_in(pool)
            let.go.set()
            time.sleep(random.choice([0, 0.0005, 0.001, 0.002]))  # any moment will do
            for name, pid in (("keeper", keeper), ("zygote", zygote)):
                if victims in (name, "both"):
                    os.kill(pid, signal.SIGKILL)

        result = run_beside(agent, disturb)
        assert result.state is WorkerState.SUCCEEDED
        assert agent.attempt <= 1, "one restart, if the workers ran already"


@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_before_a_group_without_a_loop(victims: str, tmp_path: Path) -> None:
    """`start_processes` has its own helpers; they are replaced as well."""
    from phalanx.workers.worker_group import GroupOptions
    from phalanx.workers.worker_kinds import SubprocessContext

    pool = HelperPool("exec")
    kill(pool, victims)
    options = GroupOptions(take_helpers=pool.take, retire=pool.retire)
    logs = DefaultLogsSpecs(str(tmp_path))
    with SubprocessContext("g", "/bin/true", {0: ()}, {0: {}}, logs, options=options) as group:
        group.start()
        result = group.wait(HUNG)
    pool.close()
    assert result is not None
    assert not result.failures
    assert gone(group.pids()[0])
