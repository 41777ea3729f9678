"""The owner loop answers in every phase, whatever a helper or a rendezvous does, and waits without CPU."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from phalanx.agent.logs.specs import DefaultLogsSpecs
from phalanx.agent.spec import AgentOptions, WorkerSpec
from phalanx.agent.warm.helper_pool import HelperPool
from phalanx.agent.workers.result import RunResult
from phalanx.cluster.handler import RendezvousInfo
from phalanx.cluster.solo import SoloRendezvous
from phalanx.core.group.events import MembershipChanged, Signal, WorkerState
from phalanx.core.group.group import Phase
from phalanx.core.group.restarts import RestartPolicy
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.errors import SignalException
from phalanx.observe.local_agents import as_dict, find
from phalanx.store.tcpstore.client import TorchStoreClient
from phalanx.store.tcpstore.server import TorchStoreServer
from tests.conftest import HUNG, gone, wait_until
from tests.support.netns import free_port
from tests.support.run_helpers import Running, plain_environment, script, zygote_below
from tests.support.trials import few_or_many, play

GRACE = 10 * HUNG  # what waits for its end, or for a helper that does not answer, hangs
PAUSE = "import signal; signal.pause()"


def agent_of(code: str, at: Path, handler: Any = None, **more: Any) -> LocalElasticAgent:
    options = {name: more.pop(name) for name in ("helpers", "restart_policy") if name in more}
    spec = WorkerSpec(
        "r", 1, handler or SoloRendezvous("job"), entrypoint=sys.executable, args=("-c", code), max_restarts=1
    )
    more = {"shutdown_timeout": GRACE, **more}
    return LocalElasticAgent(
        spec, DefaultLogsSpecs(str(at / "logs")), options=AgentOptions(**options), **more
    )


def status_of(agent: int) -> dict[str, Any] | None:
    return next((as_dict(one) for one in find()[0] if one.job.pid == agent), None)


def is_in(agent: LocalElasticAgent, phase: str) -> Callable[[], bool]:
    return lambda: agent.state.phase == phase


@contextmanager
def stopped_zygote() -> Iterator[HelperPool]:
    """Helpers that take nothing in."""
    pool = HelperPool("exec")
    assert pool.current is not None
    zygote = zygote_below(pool.current.pid)
    zygote.suspend()
    try:
        yield pool
    finally:
        pool.close()
        wait_until(lambda: gone(zygote.pid), "the end of the zygote")


# ---- a helper that is busy or stopped ------------------------------------------------------------------


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_helper_imports(sig: int, code: int, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    importing = tmp_path / "importing"
    (packages / "busy.py").write_text(
        f"import time\nopen({str(importing)!r}, 'w').close()\ntime.sleep({GRACE})\nVALUE = 1\n"
    )
    main = script(tmp_path, "print('ready', flush=True)\n")
    env = plain_environment(PYTHONPATH=str(packages), XDG_CACHE_HOME=str(tmp_path / "cache"))
    port = free_port()
    words = ["--preload", "busy", "--health-listen", str(port), "--grace", str(GRACE), main]
    with Running(words, env=env) as job:
        wait_until(importing.exists, "the import")
        wait_until(
            lambda: (status_of(job.agent) or {}).get("phase") == "STARTING", "an answer from the agent"
        )
        told = status_of(job.agent)
        assert told is not None
        assert told["waiting_for"] == "waiting for the workers to start"
        with urlopen(f"http://127.0.0.1:{port}/", timeout=HUNG) as answer:
            assert answer.status == 200
        job.signal(sig)
        ended = job.end()
    assert ended.code == code, ended
    assert "ready" not in ended.out


def test_a_signal_while_the_helper_is_stopped(tmp_path: Path) -> None:
    answers: list[Any] = []
    with stopped_zygote() as pool:
        agent = agent_of(PAUSE, tmp_path, helpers=pool)

        def ring() -> None:
            wait_until(is_in(agent, "STARTING"), "the start")
            wait_until(lambda: status_of(os.getpid()), "an answer")
            answers.append(status_of(os.getpid()))
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=ring)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(SignalException) as caught:
            agent.run()
        thread.join(HUNG)
    assert caught.value.sigval is signal.SIGTERM
    assert time.monotonic() - begin < HUNG
    assert answers[0]["phase"] == "STARTING"


def test_a_second_signal_ends_workers_whose_helper_is_stopped(tmp_path: Path) -> None:
    main = script(
        tmp_path, "import os; print('ready 0', os.getpid(), flush=True); import time; time.sleep(1000)"
    )
    with Running(["--warm", "off", "--grace", str(GRACE), main]) as job:
        (worker,) = job.workers(1).values()
        zygote = psutil.Process(worker).parent()
        assert zygote is not None
        zygote.suspend()
        job.signal(signal.SIGTERM)
        job.read_until("SIGTERM: stopping")
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
        wait_until(lambda: gone(worker) and gone(zygote.pid), "the end of the worker")


def test_a_helper_that_does_not_start_workers_is_replaced(tmp_path: Path) -> None:
    """Another round is due while it is silent: it is killed, and the next start has new helpers."""
    with stopped_zygote() as pool:
        agent = agent_of("", tmp_path, helpers=pool)
        first = pool.current

        def change() -> None:
            wait_until(is_in(agent, "STARTING"), "the start")
            agent.post(MembershipChanged(waiting=1))

        thread = threading.Thread(target=change)
        thread.start()
        result = agent.run()
        thread.join(HUNG)
        assert (result.state, agent.attempt) == (WorkerState.SUCCEEDED, 0)
        assert agent.state.round is not None
        assert agent.state.round.number == 2
        assert first is not None
        wait_until(lambda: gone(first.pid), "the end of the first helpers")


def test_much_more_than_a_socket_holds_is_sent_when_the_helper_takes_it(tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(0 if len(os.environ['LARGE']) == 100_000 else 1)"
    with stopped_zygote() as pool, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LARGE", "x" * 100_000)
        for number in range(30):
            patch.setenv(f"LARGE{number}", "x" * 30_000)
        agent = agent_of(code, tmp_path, helpers=pool)
        assert pool.current is not None
        (zygote,) = psutil.Process(pool.current.pid).children()

        def go_on() -> None:
            assert pool.current is not None
            wait_until(lambda: pool.current is not None and pool.current.channel.unsent, "a full socket")
            zygote.resume()

        thread = threading.Thread(target=go_on)
        thread.start()
        result = agent.run()
        thread.join(HUNG)
    assert result.state is WorkerState.SUCCEEDED, result.failures


# ---- no CPU while it waits -----------------------------------------------------------------------------


class Waiting(SoloRendezvous):
    """A rendezvous that takes until it is let go."""

    immediate = False

    def __init__(self) -> None:
        super().__init__("job")
        self.go = threading.Event()

    def next_rendezvous(self) -> RendezvousInfo:
        self.go.wait(HUNG)
        return super().next_rendezvous()


class OfTwo(SoloRendezvous):
    """Node 0 of two; the other one never comes to the exit barrier."""

    immediate = False

    def __init__(self, store: Any) -> None:
        super().__init__("job")
        self.store = store

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self.store, 0, 2, None)


def use_of(thread: int) -> tuple[float, int]:
    """Seconds of CPU and voluntary context switches of one thread."""
    at = Path(f"/proc/self/task/{thread}")
    fields = (at / "stat").read_text().rpartition(")")[2].split()
    lines = (at / "status").read_text().splitlines()
    switches = next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), switches


def idle_in(agent: LocalElasticAgent, phase: str, then: Callable[[], None]) -> RunResult | None:
    """Run in a thread; measure it for a second of this phase, and then let it end."""
    results: list[RunResult] = []
    ids: list[int] = []

    def run() -> None:
        ids.append(threading.get_native_id())
        try:
            results.append(agent.run())
        except SignalException:
            pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(is_in(agent, phase), phase)

        def settled() -> bool:
            """Whether what is done once, at the beginning, is over; a busy machine takes longer."""
            begin = use_of(ids[0])[1]
            time.sleep(0.2)
            prepared = phase != "RUNNING" or agent._workers._quiet_at is None  # for a failure: done once
            return prepared and use_of(ids[0])[1] - begin < 6

        wait_until(settled, f"an idle agent in {phase}")
        before = use_of(ids[0])
        time.sleep(1.0)  # the span that is measured
        assert agent.state.phase == phase
        after = use_of(ids[0])
    finally:
        then()
        thread.join(HUNG)
    assert not thread.is_alive()
    assert after[0] - before[0] < 0.2, f"{after[0] - before[0]} s of CPU in {phase}"
    assert after[1] - before[1] < 30, f"{after[1] - before[1]} wake-ups in {phase}"
    return results[0] if results else None


def joining_is_idle(tmp_path: Path) -> None:
    handler = Waiting()
    assert idle_in(agent_of("", tmp_path, handler), "JOINING", handler.go.set) is not None


def starting_is_idle(tmp_path: Path) -> None:
    with stopped_zygote() as pool:
        agent = agent_of(PAUSE, tmp_path, helpers=pool)
        idle_in(agent, "STARTING", lambda: agent.post(Signal(signal.SIGTERM)))


def running_is_idle(tmp_path: Path) -> None:
    agent = agent_of(PAUSE, tmp_path)
    idle_in(agent, "RUNNING", lambda: agent.post(Signal(signal.SIGTERM)))


def a_stop_is_idle(tmp_path: Path) -> None:
    """The pool's look at the imports falls into the grace, where nothing can be done about it."""
    mark = tmp_path / "mark"
    ignore = (
        f"import signal; signal.signal(15, signal.SIG_IGN); open({str(mark)!r}, 'w').close(); signal.pause()"
    )
    pool = HelperPool("python")
    agent = agent_of(ignore, tmp_path, helpers=pool)

    def stop() -> None:
        wait_until(lambda: mark.exists() and is_in(agent, "RUNNING")(), "the worker")
        pool._due = [time.monotonic() + 0.1]
        agent.post(Signal(signal.SIGTERM))

    thread = threading.Thread(target=stop)
    thread.start()
    idle_in(agent, "ENDING", lambda: agent.post(Signal(signal.SIGTERM)))
    thread.join(HUNG)


def back_off_is_idle(tmp_path: Path) -> None:
    policy = RestartPolicy(max_restarts=1, free=0, backoff_first=HUNG, backoff_max=HUNG, patience=0.0)
    agent = agent_of("raise SystemExit(1)", tmp_path, restart_policy=policy)
    idle_in(agent, "WAITING", lambda: agent.post(Signal(signal.SIGTERM)))
    assert agent.attempt == 1


def the_exit_barrier_is_idle(tmp_path: Path) -> None:
    server = TorchStoreServer("localhost", 0)
    server.start()
    try:
        client = TorchStoreClient("localhost", server.port)
        agent = agent_of("", tmp_path, OfTwo(client), exit_barrier_timeout=10 * HUNG)
        idle_in(agent, "BARRIER", lambda: agent.post(Signal(signal.SIGTERM)))
        client.close()
    finally:
        server.close()


def test_an_exit_barrier_that_times_out_is_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    with TorchStoreServer("localhost", 0) as server:
        client = TorchStoreClient("localhost", server.port)
        agent = agent_of("", tmp_path, OfTwo(client), exit_barrier_timeout=0.1)
        assert agent.run().state is WorkerState.SUCCEEDED
        client.close()


PHASES = [joining_is_idle, starting_is_idle, running_is_idle, a_stop_is_idle, back_off_is_idle,
          the_exit_barrier_is_idle]  # fmt: skip


@few_or_many(ways=len(PHASES))
@pytest.mark.parametrize("phase", PHASES, ids=[phase.__name__ for phase in PHASES])
def test_a_phase_is_idle(
    phase: Callable[[Path], None], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")  # of the exit barrier
    play(times, tmp_path, phase)


def test_a_signal_that_another_thread_receives_ends_the_wait(tmp_path: Path) -> None:
    """The kernel may deliver a signal to any thread; the owner thread then sleeps on in `poll`."""
    agent = agent_of(PAUSE, tmp_path, helpers=HelperPool("exec"))
    ended, woken = threading.Event(), []

    def waits_for_ever() -> bool:
        loop = agent._loop
        deadlines = [loop._wake_at, *(part.deadline(Phase.RUNNING) for part in loop.parts)]
        return is_in(agent, "RUNNING")() and not any(deadlines) and loop._asleep

    def receive() -> None:
        wait_until(waits_for_ever, "running workers, and a loop without a deadline")
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        woken.append(ended.wait(HUNG))
        agent.post(Signal(signal.SIGTERM))

    thread = threading.Thread(target=receive)
    thread.start()
    before = signal.set_wakeup_fd(-1)
    with pytest.raises(SignalException):
        agent.run()
    ended.set()
    thread.join(HUNG)
    assert woken == [True]
    assert signal.set_wakeup_fd(before) == -1, "restored"
