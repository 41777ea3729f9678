"""Helpers that are killed while they serve no workers, or are stopped while they do: the job goes on."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from phalanx.agent.warm.helper_pool import HelperPool
from phalanx.agent.warm.spawner import (
    Event,
    HelpersLost,
    Spawner,
    StartRefused,
)
from phalanx.agent.workers.result import RunResult
from phalanx.agent.workers.worker_kinds import SubprocessContext
from phalanx.cluster.clock import clock
from phalanx.core.group.events import RoundOver, Signal, WorkerState
from phalanx.core.group.restarts import RestartPolicy
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from phalanx.errors import SignalException
from phalanx.helpers import job_cgroup
from phalanx.helpers.lease_timer import LeaseTimer, LeaseWitness
from phalanx.helpers.messages import Exit, GroupStopped, WorkerLaunch, WorkersFenced, WorkersStarted
from phalanx.kernel import is_readable, is_stopped, read_text
from tests.conftest import HUNG, gone, wait_until
from tests.support.fault_agent import KINDS, family
from tests.support.run_helpers import (
    FOREVER,
    Running,
    all_gone,
    helpers_of,
    kill_at_once,
    run,
    script,
    unshare,
    zygote_below,
)
from tests.support.trials import few_or_many as few_or_200
from tests.support.trials import play
from tests.system.test_faults import Agent, agent, all_gone_in_time, few_or_many
from tests.system.test_loop import PAUSE, Waiting, agent_of, idle_in, is_in, status_of

__all__ = ["agent"]  # a fixture

VICTIMS = ["zygote", "keeper", "both"]


def helpers_in(pool: HelperPool) -> tuple[int, int]:
    """Keeper and zygote of a pool's current helpers, once they are up."""
    wait_until(lambda: pool.current is not None and not pool.current.lost, "helpers")
    assert pool.current is not None
    return pool.current.pid, zygote_below(pool.current.pid).pid


def kill(pool: HelperPool, victims: str) -> None:
    keeper, zygote = helpers_in(pool)
    kill_at_once(pid for name, pid in (("keeper", keeper), ("zygote", zygote)) if victims in (name, "both"))


def stop_helpers(agent: int, victims: str) -> list[int]:
    """SIGSTOP to some of the helpers of a job; all of them."""
    found = helpers_of(agent)
    for pid in found:
        if victims == "both" or psutil.Process(pid).name().endswith(victims):
            os.kill(pid, signal.SIGSTOP)
    return found


def run_beside(agent: LocalElasticAgent, then: Callable[[], None]) -> RunResult:
    """Run the agent in this thread and the disturbance in another."""
    failed: list[BaseException] = []

    def disturb() -> None:
        try:
            then()
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            failed.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    result = agent.run()
    thread.join(HUNG)
    if failed:
        raise failed[0]
    return result


def workers_again(job: Running, count: int) -> dict[int, int]:
    """The workers after one restart."""
    job.read_until("ready ", 2 * count)
    return job.workers(count)


# ---- killed while idle ---------------------------------------------------------------------------------


@few_or_200(ways=12)
@pytest.mark.parametrize("kind", ["exec", "python"])
@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_while_joining(victims: str, kind: str, times: int, tmp_path: Path) -> None:
    """A spare, or a first node: helpers wait for a round that comes later."""
    for turn in range(times):
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


@few_or_200(ways=6)
@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_between_a_failure_and_its_restart(victims: str, times: int, tmp_path: Path) -> None:
    policy = RestartPolicy(max_restarts=1, free=0, backoff_first=0.5, patience=0.0)
    code = "import os, sys; sys.exit(1 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
    for turn in range(times):
        pool = HelperPool("exec")
        agent = agent_of(code, tmp_path / str(turn), helpers=pool, restart_policy=policy)

        def disturb(agent: LocalElasticAgent = agent, pool: HelperPool = pool) -> None:
            wait_until(is_in(agent, "WAITING"), "the back-off")
            kill(pool, victims)

        result = run_beside(agent, disturb)
        assert (result.state, agent.attempt) == (WorkerState.SUCCEEDED, 1)


@few_or_200(ways=6, few=3)
@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_just_before_the_start(victims: str, times: int, tmp_path: Path) -> None:
    """The loop has not seen it yet, or the request is on its way: at any moment of the start."""
    for turn in range(times):
        handler, pool = Waiting(), HelperPool("exec")
        agent = agent_of("import time; time.sleep(0.3)", tmp_path / str(turn), handler, helpers=pool)

        def disturb(
            agent: LocalElasticAgent = agent, pool: HelperPool = pool, let: Waiting = handler
        ) -> None:
            wait_until(is_in(agent, "JOINING"), "the rendezvous")
            keeper, zygote = helpers_in(pool)
            let.go.set()
            time.sleep(random.choice([0, 0.0005, 0.001, 0.002]))  # any moment will do
            both = {"keeper": keeper, "zygote": zygote}
            kill_at_once(pid for name, pid in both.items() if victims in (name, "both"))

        result = run_beside(agent, disturb)
        assert result.state is WorkerState.SUCCEEDED
        assert agent.attempt <= 1, "one restart, if the workers ran already"


@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_before_a_group_without_a_loop(victims: str, tmp_path: Path) -> None:
    """`start_processes` has its own helpers; they are replaced as well."""
    from phalanx.agent.workers.worker_group import GroupOptions

    pool = HelperPool("exec")
    helpers = helpers_in(pool)
    kill(pool, victims)
    wait_until(lambda: all_gone(helpers), "the end of the helpers")
    options = GroupOptions(take_helpers=pool.take, retire=pool.retire)
    logs = DefaultLogsSpecs(str(tmp_path))
    with SubprocessContext("g", "/bin/true", {0: ()}, {0: {}}, logs, options=options) as group:
        group.start()
        result = group.wait(HUNG)
    pool.close()
    assert result is not None
    assert not result.failures
    assert gone(group.pids()[0])


# ---- stopped while workers run -------------------------------------------------------------------------


GRACE = ("--grace", "1000")  # beyond HUNG: what waits for its end hangs


@few_or_200(ways=3)
@pytest.mark.parametrize("victims", VICTIMS)
def test_a_failure_is_noticed_although_helpers_are_stopped(victims: str, times: int, tmp_path: Path) -> None:
    main = script(tmp_path, FOREVER)

    def trial(_: Path) -> None:
        with Running([*GRACE, "--nproc-per-node", "2", "--max-restarts", "1", main]) as job:
            workers = job.workers(2)
            stop_helpers(job.agent, victims)
            os.kill(workers[1], signal.SIGKILL)
            again = workers_again(job, 2)
            assert all_gone(workers), "nothing is started beside old workers"
            # The launcher writes it beside the start, not before it. A zygote that was stopped before it had
            # told of the start is a lost one: there is no restart then, but the same start again.
            while "rank 1: SIGKILL" not in job.text and "lost during the start" not in job.text:
                job.read_on()
            job.signal(signal.SIGTERM)
            assert job.end().code == 143
            assert all_gone(again)

    play(times, tmp_path, trial)


@few_or_200(ways=3)
@pytest.mark.parametrize("victims", VICTIMS)
def test_sigterm_ends_the_agent_although_helpers_are_stopped(
    victims: str, times: int, tmp_path: Path
) -> None:
    """The workers still get their grace: the one that saves its state does so."""

    def trial(folder: Path) -> None:
        saved = folder / "saved"
        main = script(
            folder,
            "import signal, sys\n"
            f"def save(*_):\n    open({str(saved)!r}, 'w').close()\n    sys.exit(0)\n"
            f"signal.signal(signal.SIGTERM, save)\n{FOREVER}",
        )
        with Running([*GRACE, main]) as job:
            workers = job.workers(1)
            # A zygote that is stopped before it has answered the start is killed, and its worker with it.
            wait_until(lambda: (status_of(job.agent) or {}).get("phase") == "RUNNING", "the start's answer")
            helpers = stop_helpers(job.agent, victims)
            job.signal(signal.SIGTERM)
            assert job.end().code == 143
            assert saved.exists()
            assert all_gone(workers)
            wait_until(lambda: all_gone(helpers), "the end of the helpers")

    play(times, tmp_path, trial)


SLEEP = "while :; do sleep 0.05; done"


def test_a_stop_that_overtakes_the_answer_of_a_start_is_a_signal_to_the_workers(tmp_path: Path) -> None:
    """The zygote is stopped with its answer still unread: that is no sign that it takes the stop."""
    ready = tmp_path / "ready"
    args: dict[int, tuple[str, ...]] = {0: ("-c", f"trap 'exit 7' TERM; touch {ready}; {SLEEP}")}
    group = SubprocessContext("s", "/bin/sh", args, {0: {}}, DefaultLogsSpecs(str(tmp_path)))
    group.begin()
    wait_until(ready.exists, "the worker")
    assert group.spawner is not None
    zygote = zygote_below(group.spawner.pid)
    wait_until(lambda: select.select([group.spawner.fileno()], [], [], 0)[0], "the answer")
    zygote.suspend()
    try:
        group.ask_stop(signal.SIGTERM, 10 * HUNG)
        wait_until(lambda: (group.advance(0.05), group.exit_code(0) is not None)[1], "the end of the worker")
        assert group.exit_code(0) == 7
    finally:
        zygote.resume()
        group.close()


@few_or_many
def test_stopped_helpers_end_with_a_killed_agent(times: int, agent: Callable[..., Agent]) -> None:
    for _ in range(times):
        one = agent("family")
        pids = one.pids(KINDS)
        zygote = zygote_below(pids["helpers"]).pid
        os.kill(zygote, signal.SIGSTOP)
        os.kill(pids["helpers"], signal.SIGSTOP)
        one.process.kill()
        one.process.wait()
        all_gone_in_time({**pids, "zygote": zygote})


def test_workers_are_killed_at_once_although_the_zygote_is_stopped(tmp_path: Path) -> None:
    """As at the end of a lease: nothing is waited for, so nobody has to look after the group meanwhile."""
    args: dict[int, tuple[str, ...]] = {0: ("-c", "trap '' TERM; while :; do sleep 0.05; done")}
    group = start_processes("k", "/bin/sh", args, {0: {}}, DefaultLogsSpecs(str(tmp_path)))
    assert group.spawner is not None
    worker, zygote = group.pids()[0], zygote_below(group.spawner.pid).pid
    os.kill(zygote, signal.SIGSTOP)
    group.ask_stop(signal.SIGKILL, 0.0)
    wait_until(lambda: gone(worker), "the end of the worker")
    os.kill(zygote, signal.SIGCONT)
    group.close(signal.SIGKILL)
    assert not group.failed(), "stopped by us: no failure"


# ---- all of them killed at once ------------------------------------------------------------------------


@few_or_many
def test_a_workers_children_end_although_no_process_of_ours_is_left(
    times: int, agent: Callable[..., Agent]
) -> None:
    """As an OOM killer may do: the kernel itself kills the workers' process groups."""
    for _ in range(times):
        one = agent("family")
        pids = one.pids(KINDS)
        zygote = zygote_below(pids["helpers"]).pid
        mine = {name: pid for name, pid in pids.items() if name.startswith(("worker", "child"))}
        strays = [pid for name, pid in pids.items() if name.startswith(("session", "stray"))]
        kill_at_once((pids["helpers"], zygote, one.process.pid))
        all_gone_in_time(mine)
        one.process.wait()
        for pid in strays:
            if not gone(pid):  # outside of the process group; the next job would end them
                os.kill(pid, signal.SIGKILL)


@few_or_200()
def test_pkill_by_name_leaves_a_process_that_cleans_up(times: int, tmp_path: Path) -> None:
    """`pkill -9 phalanx` ends the agent; keeper and zygote have other names."""

    def trial(folder: Path) -> None:
        with Running(["--no-python", "sh", "-c", family(folder)]) as job:
            files = {kind: folder / f"{kind}.0" for kind in KINDS}
            wait_until(lambda: all(f.exists() and f.read_text().strip() for f in files.values()), "all pids")
            pids = {kind: int(file.read_text()) for kind, file in files.items()}
            names = [psutil.Process(pid).name() for pid in (job.agent, *helpers_of(job.agent))]
            assert [name for name in names if "phalanx" in name] == names[:1]
            os.kill(job.agent, signal.SIGKILL)
            all_gone_in_time(pids)

    play(times, tmp_path, trial, at_once=3)  # a second is promised, to each of them


def cgroup_of(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next((line[3:] for line in lines if line.startswith("0::")), "")


def is_populated(group: Path) -> bool:
    """Whether a process is in a control group; one that is ending is, until nothing of it is left."""
    try:
        return "populated 1" in (group / "cgroup.events").read_text()
    except OSError:
        return False


def has_memory(pid: int) -> bool:
    """Whether a process can still run code of its own."""
    try:
        return "VmSize" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


needs_cgroups = pytest.mark.skipif(not job_cgroup.base(), reason="control groups cannot be written here")


@needs_cgroups
@few_or_200(ways=2)
@pytest.mark.parametrize("victims", ["helpers", "all"])
def test_the_control_group_catches_strays(victims: str, times: int, tmp_path: Path) -> None:
    """Zygote and keeper killed: the agent ends the strays before it restarts. All killed: the next job."""

    def trial(folder: Path) -> None:
        with Running(["--no-python", "--max-restarts", "1", "sh", "-c", family(folder)]) as job:
            files = {kind: folder / f"{kind}.0" for kind in KINDS}
            wait_until(lambda: all(f.exists() and f.read_text().strip() for f in files.values()), "all pids")
            pids = {kind: int(file.read_text()) for kind, file in files.items()}
            for file in files.values():
                file.unlink()
            kill_at_once([*([job.agent] if victims == "all" else []), *helpers_of(job.agent)])
            if victims == "helpers":
                wait_until(lambda: files["worker"].exists(), "the restart")
                # One that has left its group may be seen a moment longer, without memory or files of its own.
                left = [pid for pid in pids.values() if not gone(pid) and has_memory(pid)]
                assert not left, "nothing is started over leftovers"
                wait_until(lambda: all(f.exists() for f in files.values()), "all that the end has to kill")
        if victims == "all":
            with Running([script(folder, FOREVER)]) as job:
                job.workers(1)
                wait_until(lambda: all(gone(pid) for pid in pids.values()), "the end of the strays")

    play(times, tmp_path, trial, at_once=3)


@needs_cgroups
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a time namespace")
def test_who_sees_other_clocks_kills_nobody(tmp_path: Path) -> None:
    """In another time namespace every process seems to have started at another time."""
    with Running([script(tmp_path, FOREVER)]) as job:
        (worker,) = job.workers(1).values()
        wait_until(lambda: "/phalanx-" in cgroup_of(worker), "the control group")
        elsewhere = ["unshare", "--time", "--boottime", "3600", "--fork", sys.executable, "-c"]
        look = "from phalanx.helpers.job_cgroup import sweep\nassert sweep()"
        subprocess.run([*elsewhere, look], check=True, timeout=HUNG)
        assert not gone(worker)
        assert psutil.Process(worker).status() != psutil.STATUS_ZOMBIE


INSIDE = "print('inside', open('/proc/self/cgroup').read().rpartition('/')[2].strip(), flush=True)\n"


@needs_cgroups
@pytest.mark.parametrize("how", ["--warm off", "--warm auto", "--no-python"])
def test_a_worker_starts_in_the_control_group(how: str, tmp_path: Path) -> None:
    """With its first line: what it starts there is caught, whatever is killed when."""
    command = [sys.executable, "-c", INSIDE] if how == "--no-python" else [script(tmp_path, INSIDE)]
    done = run(*how.split(), "--nproc-per-node", "2", *command)
    assert done.code == 0, done
    (group,) = set(re.findall(r"inside (phalanx-\S+)", done.out))
    assert done.out.count(f"inside {group}") == 2, done
    assert not Path(job_cgroup.base(), group).exists(), "it ends with the job"


def inside() -> str:
    return cgroup_of(os.getpid())


@needs_cgroups
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_function_starts_in_the_control_group(method: str, tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path))
    result = start_processes("f", inside, {0: ()}, {0: {}}, logs, start_method=method).wait(HUNG)
    assert result is not None
    assert "/phalanx-" in result.return_values[0]


@needs_cgroups
def test_without_clone3_the_zygote_moves_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A service with RestrictNamespaces=, for example."""
    monkeypatch.setattr("phalanx.kernel.clone_into", lambda _group: -1)
    logs = DefaultLogsSpecs(str(tmp_path))  # "fork": the helpers are copies of this process
    result = start_processes("f", inside, {0: ()}, {0: {}}, logs, start_method="fork").wait(HUNG)
    assert result is not None
    assert "/phalanx-" in result.return_values[0]


# Always another process, whose parent is gone. It ends by itself after so many forks or seconds, whatever
# happens to the test.
CHAIN = """
import os, time
until = time.monotonic() + 30
if os.fork() == 0:
    for _ in range(100_000):
        if os.fork() or time.monotonic() > until:
            os._exit(0)
        os.setsid()
    os._exit(0)
"""
# Each process starts others until there are 585, in as many sessions.
TREE = """
import os, time
until = time.monotonic() + 30
def grow(depth):
    for _ in range(8 if depth else 0):
        if os.fork() == 0:
            os.setsid()
            grow(depth - 1)
            time.sleep(max(0.0, until - time.monotonic()))
            os._exit(0)
if os.fork() == 0:
    grow(3)
    os._exit(0)
"""
BOMBS = {"chain": CHAIN, "tree": TREE}


class BombedJob(Running):
    """A job whose worker forks at once, in a pid namespace that ends with the test, however that ends."""

    def __init__(self, words: list[str]) -> None:
        contained = ["setpriv", "--pdeathsig", "KILL", *unshare(), "sh", "-c", '"$@" & exec sleep 1000', "sh"]
        super().__init__(words, before=contained)
        self.read_until("ready ")
        (init,) = psutil.Process(self.process.pid).children()
        (agent,) = init.children()
        self.agent = agent.pid  # its number here
        self.keeper, self.zygote = helpers_of(self.agent)
        self.worker = min(child.pid for child in psutil.Process(self.zygote).children())
        self.group = Path(job_cgroup.base(), Path(cgroup_of(self.worker)).name)


def is_seen(argument: str, but: int) -> bool:
    """Whether a process has this argument; in several looks: one that forks all the time may escape one."""
    for _ in range(30):
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if argument in read_text(f"/proc/{pid}/cmdline") and int(pid) != but:
                return True
    return False


needs_namespaces = pytest.mark.skipif(not unshare(), reason="needs a pid namespace")


@needs_cgroups
@needs_namespaces
@few_or_200(ways=6)
@pytest.mark.parametrize("victim", ["agent", "agent+keeper", "agent+zygote"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_what_forks_faster_than_it_can_be_killed_ends_with_the_agent(
    bomb: str, victim: str, times: int, tmp_path: Path
) -> None:
    """From its first line on, and although the agent is killed at once."""
    mark = f"bomb{os.getpid()}"
    main = script(tmp_path, f"{BOMBS[bomb]}print('ready 0', flush=True)\ntime.sleep(30)\n")
    for _ in range(times):
        with BombedJob(["--warm", "off", main, mark]) as job:
            kill_at_once(getattr(job, name) for name in victim.split("+"))
            wait_until(lambda: gone(job.worker), "the end of the worker")
            wait_until(lambda: not is_populated(job.group), "the end of the group")
            assert not is_seen(mark, but=job.process.pid), "it is outside of the group"
            job_cgroup.remove(str(job.group))


KILLER = """
import os, signal, subprocess
from phalanx.helpers import job_cgroup
path = job_cgroup.JobCgroup.make()._path
inside = subprocess.Popen(["sh", "-c", f"echo 0 > {path}/cgroup.procs && exec sleep 1000"])
while str(inside.pid) not in open(f"{path}/cgroup.procs").read().split():
    os.sched_yield()
real = job_cgroup._write
def write(*words):
    real(*words)
    os._exit(0)
job_cgroup._write = write
killer = os.fork()
if killer == 0:
    job_cgroup.kill(path)
os.waitpid(killer, 0)
print(inside.wait(), job_cgroup.remove(path))
"""


@needs_cgroups
def test_who_is_killed_while_it_kills_a_group_leaves_nothing_frozen() -> None:
    """As a keeper that is killed just after the agent: the zygote is in the group."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER], capture_output=True, text=True, timeout=HUNG, check=True
    )
    assert done.stdout == "-9 True\n", done


def test_a_plain_fork_bomb_ends_with_the_worker(tmp_path: Path) -> None:
    """In the worker's process group: killed at once, although its leader is gone; no control group needed."""
    mark = tmp_path / "mark"
    bomb = CHAIN.replace("os.setsid()", "pass") + f"open({str(mark)!r}, 'w').close(); os._exit(3)"
    args: dict[int, tuple[str, ...]] = {0: ("-c", bomb)}
    group = start_processes("b", sys.executable, args, {0: {}}, DefaultLogsSpecs(str(tmp_path)))
    wait_until(mark.exists, "the bomb")
    group.close(signal.SIGTERM, 0.5)
    assert not group.unkillable


# ---- a stopped agent -----------------------------------------------------------------------------------


@few_or_many
def test_workers_end_when_the_lease_is_not_renewed(times: int, tmp_path: Path) -> None:
    """The agent is stopped; the zygote kills the workers at the end of the lease, and not before."""
    for turn in range(times):
        agent = agent_of(PAUSE, tmp_path / str(turn), helpers=HelperPool("exec"))
        workers = agent._workers
        workers.lease_until(clock() + HUNG)
        found: list[float] = []

        def disturb(agent: LocalElasticAgent = agent) -> None:
            wait_until(is_in(agent, "RUNNING"), "the worker")
            (pid,) = (worker.id for worker in agent.get_worker_group().workers)
            workers.lease_until(clock() + 0.9)  # noqa: B023 - called in this turn
            until = clock() + 1.2
            workers.lease_until(until)  # noqa: B023
            wait_until(lambda: gone(pid), "the end of the worker")
            found.append(clock() - until)  # noqa: B023
            agent.post(RoundOver(1, "the lease has expired", at_once=True))
            wait_until(lambda: agent.state.round is not None and agent.state.round.number == 2, "a new round")
            workers.lease_until(float("inf"))  # noqa: B023
            wait_until(is_in(agent, "RUNNING"), "the workers again")
            agent.post(Signal(signal.SIGTERM))

        with pytest.raises(SignalException):
            run_beside(agent, disturb)
        assert found
        assert found[0] >= 0.0, "it was renewed"


def test_no_worker_runs_that_is_ready_after_the_end_of_its_lease(tmp_path: Path) -> None:
    """The helpers had been stopped when they were asked to start it."""
    mark, timer = tmp_path / "mark", LeaseTimer()
    timer.set(clock() - 1.0)
    wait_until(lambda: is_readable(timer.fileno()), "the end of the lease")
    spawner = Spawner()
    events: list[Event] = []
    end = time.monotonic() + HUNG
    try:
        program = WorkerLaunch(0, ["/bin/sh", "-c", f": > {mark}"], "/bin/sh")
        spawner.request([program], {}, lease=timer.fileno())
        while not any(isinstance(event, GroupStopped | StartRefused | HelpersLost) for event in events):
            assert time.monotonic() < end, events
            events += spawner.events(1.0)
    finally:
        spawner.close()
        timer.close()
    assert [type(event) for event in events] == [WorkersFenced, WorkersStarted, Exit, GroupStopped]
    assert [event.code for event in events if isinstance(event, Exit)] == [-signal.SIGKILL]
    assert not mark.exists()


@pytest.mark.parametrize("zygote", ["stopped", "slow", "slow, renewed", "in time"])
def test_the_keeper_gives_a_zygote_its_time(zygote: str) -> None:
    """At the end of a lease: none if it is stopped; and it does nothing if there is nothing left to do."""
    timer, poll = LeaseTimer(), select.poll()
    witness = LeaseWitness(poll)
    process = subprocess.Popen(["sleep", "1000"])
    try:
        if zygote == "stopped":
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: is_stopped(process.pid), "the stop")
        timer.set(clock() + 1000)
        witness.take([os.dup(timer.fileno())])
        assert not witness.is_over(process.pid)
        begin = time.monotonic()
        timer.set(clock() + 0.1)
        assert poll.poll(HUNG * 1000), "the timer wakes it"
        assert time.monotonic() - begin >= 0.1
        assert witness.is_over(process.pid) == (zygote == "stopped")
        assert not poll.poll(0), "only once: it does not spin"
        assert witness.due is not None
        if zygote == "in time":
            witness.take([])
        elif zygote == "slow, renewed":
            timer.set(clock() + 1000)
        while not witness.is_over(process.pid) and witness.due is not None:
            poll.poll(max(0.0, witness.due - time.monotonic()) * 1000 + 1)
        assert witness.is_over(process.pid) == (zygote in ("stopped", "slow"))
    finally:
        process.kill()
        process.wait()
        witness.take([])
        timer.close()


def test_without_another_round_a_lease_that_ran_out_is_a_failure(tmp_path: Path) -> None:
    code = "import os, signal\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': signal.pause()"
    agent = agent_of(code, tmp_path, helpers=HelperPool("exec"))
    agent._workers.lease_until(clock() + 10 * HUNG)
    assert agent._loop.parts[0] is agent._workers

    def renew() -> None:
        wait_until(is_in(agent, "RUNNING"), "the worker")
        agent._workers.lease_until(clock() + 0.5)
        wait_until(lambda: agent._pcontext is not None and agent._pcontext.fenced, "the end of the lease")
        agent._workers.lease_until(float("inf"))

    result = run_beside(agent, renew)
    assert (result.state, agent.attempt) == (WorkerState.SUCCEEDED, 1)


# ---- no CPU meanwhile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", VICTIMS)
def test_a_stop_is_idle_although_helpers_are_stopped(victims: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    ignore = (
        f"import signal; signal.signal(15, signal.SIG_IGN); open({str(mark)!r}, 'w').close(); signal.pause()"
    )
    pool = HelperPool("exec")
    agent = agent_of(ignore, tmp_path, helpers=pool, shutdown_timeout=10 * HUNG)
    found = helpers_in(pool)

    def stop() -> None:
        wait_until(lambda: mark.exists() and is_in(agent, "RUNNING")(), "the worker")
        for name, pid in zip(("keeper", "zygote"), found, strict=True):
            if victims in (name, "both"):
                os.kill(pid, signal.SIGSTOP)
        agent.post(Signal(signal.SIGTERM))

    thread = threading.Thread(target=stop)
    thread.start()
    idle_in(agent, "ENDING", lambda: agent.post(Signal(signal.SIGTERM)))
    thread.join(HUNG)
    wait_until(lambda: all_gone(found), "the end of the helpers")


def test_running_is_idle_although_helpers_are_stopped(tmp_path: Path) -> None:
    pool = HelperPool("exec")
    agent = agent_of(PAUSE, tmp_path, helpers=pool)
    found = helpers_in(pool)

    def stop() -> None:
        wait_until(is_in(agent, "RUNNING"), "the worker")
        for pid in found:
            os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    idle_in(agent, "RUNNING", lambda: agent.post(Signal(signal.SIGTERM)))
    thread.join(HUNG)


@pytest.mark.parametrize("victims", VICTIMS)
def test_joining_is_idle_after_helpers_have_died_again_and_again(victims: str, tmp_path: Path) -> None:
    handler, pool = Waiting(), HelperPool("exec")
    agent = agent_of("", tmp_path, handler, helpers=pool)

    def disturb() -> None:
        wait_until(is_in(agent, "JOINING"), "the rendezvous")
        first = pool.current
        kill(pool, victims)
        wait_until(lambda: pool.current is not first, "the next helpers")
        kill(pool, victims)
        wait_until(lambda: pool.current is None, "no helpers, for a while")

    thread = threading.Thread(target=disturb)
    thread.start()
    result = idle_in(agent, "JOINING", handler.go.set)
    thread.join(HUNG)
    assert result is not None
    assert result.state is WorkerState.SUCCEEDED
