"""Timers with real workers: only workers that do not leave a scope in time are stopped."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue as queue_module
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.agent.supervision.timers import timer_pipe
from phalanx.elastic.timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
    LocalTimerClient,
    LocalTimerServer,
    expires,
)
from tests.conftest import HUNG, gone, wait_until
from tests.system.hostile_user import as_root

FORK = multiprocessing.get_context("fork")
KINDS = ("queue", "pipe")


class Bed:
    """A running server of one kind with its default interval, and its workers."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.path = str(folder / "pipe")
        self.queue: Any = FORK.Queue() if kind == "queue" else None
        self.events: list[tuple[str, Any]] = []
        self.server: Any = (
            LocalTimerServer(self.queue)
            if kind == "queue"
            else FileTimerServer(self.path, "run", log_event=lambda *event: self.events.append(event))
        )
        self.server.start()
        self.workers: list[Any] = []

    def client(self, **named: Any) -> Any:
        return LocalTimerClient(self.queue) if self.queue else FileTimerClient(self.path, **named)

    def start(self, work: Callable[..., None], *args: Any) -> Any:
        worker = FORK.Process(target=work, args=(self, *args))
        worker.start()
        self.workers.append(worker)
        return worker

    def run(self, work: Callable[..., None], *args: Any) -> int | None:
        worker = self.start(work, *args)
        worker.join(HUNG)
        return worker.exitcode

    def held(self) -> dict[int, list[Any]]:
        return self.server.get_expired_timers(1e12)

    def write(self, data: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY)
        os.write(fd, data)
        os.close(fd)

    def end(self) -> None:
        for worker in self.workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
            worker.close()
        self.server.stop()
        if self.queue:
            self.queue.close()
            self.queue.join_thread()
            # An unused queue keeps its pipe until it is garbage-collected.
            self.queue._reader.close()
            self.queue._writer.close()


@pytest.fixture
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    made = Bed(getattr(request, "param", "pipe"), tmp_path)
    yield made
    made.end()


both = pytest.mark.parametrize("bed", KINDS, indirect=True)


def overstay(bed: Bed) -> None:
    with expires(0.05, "too slow", bed.client()):
        signal.pause()


def in_time(bed: Bed) -> None:
    client = bed.client()
    for _ in range(100):
        with expires(HUNG, "outer", client), expires(HUNG, "inner", client):
            pass


def hang_with_the_interpreter_locked(bed: Bed) -> None:
    import ctypes

    with expires(0.05, "locked", bed.client()):
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter lock


def inner_overstays(bed: Bed) -> None:
    client = bed.client()
    with expires(1000, "same", client):
        with expires(1000, "same", client):
            pass
        with expires(0.05, "same", client):
            signal.pause()


def after_an_inner_block(bed: Bed) -> None:
    client = bed.client()
    with expires(0.05, "same", client):
        with expires(1000, "same", client):
            pass
        signal.pause()


def recurses(bed: Bed) -> None:
    client = bed.client()
    with expires(HUNG, "same", client), expires(100 * HUNG, "same", client):
        signal.pause()


def outer_overstays(bed: Bed) -> None:
    client = bed.client()
    with expires(0.05, "outer", client):
        while True:
            with expires(1000, "inner", client):
                pass


def thread_overstays(bed: Bed) -> None:
    client = bed.client()

    def hang() -> None:
        with expires(0.05, "loader", client):
            threading.Event().wait(600)

    threading.Thread(target=hang, daemon=True).start()
    while True:
        with expires(1000, "loader", client):
            pass


def hold_and_leave(bed: Bed) -> None:
    bed.client().acquire("held", time.time() + 1000)
    os._exit(0)


def hold(bed: Bed, after: float) -> None:
    bed.client().acquire("held", time.time() + after)
    signal.pause()


def in_a_child_of_mine(bed: Bed) -> None:
    client = bed.client()
    client.acquire("parent", time.time() + 1000)
    child = os.fork()
    if not child:
        client.acquire("child", time.time() + 0.05)
        signal.pause()
    _, status = os.waitpid(child, 0)
    os._exit(os.WTERMSIG(status) + 100)


@both
@pytest.mark.parametrize(
    "work",
    [
        overstay,
        hang_with_the_interpreter_locked,
        inner_overstays,
        after_an_inner_block,
        outer_overstays,
        thread_overstays,
    ],
)
def test_a_worker_that_does_not_leave_in_time_is_killed(bed: Bed, work: Callable[..., None]) -> None:
    assert bed.run(work) == -signal.SIGKILL


@both
def test_a_worker_that_is_in_time_is_left_alone(bed: Bed) -> None:
    assert bed.run(in_time) == 0
    wait_until(lambda: not bed.held(), "no timer held")


@both
def test_a_scope_inside_of_itself_has_the_time_of_the_inner_one(bed: Bed) -> None:
    worker = bed.start(recurses)

    def replaced() -> bool:
        return bool(bed.held()) and not bed.server.get_expired_timers(time.time() + 50 * HUNG)

    wait_until(replaced, "the inner scope in place of the outer one")
    assert [len(requests) for requests in bed.held().values()] == [1]
    assert worker.is_alive()


@both
def test_a_forked_child_has_timers_of_its_own(bed: Bed) -> None:
    assert bed.run(in_a_child_of_mine) == signal.SIGKILL + 100


@both
def test_the_timers_of_a_dead_worker_vanish(bed: Bed) -> None:
    survivor = bed.start(hold, 1000)
    wait_until(lambda: survivor.pid in bed.held(), "the survivor's timer")
    assert bed.run(hold_and_leave) == 0
    victim = bed.start(hold, 1000)
    wait_until(lambda: victim.pid in bed.held(), "the victim's timer")
    victim.kill()
    wait_until(lambda: list(bed.held()) == [survivor.pid], "only the survivor's timer left")


@both
def test_a_sooner_deadline_is_not_kept_waiting_by_a_later_one(bed: Bed) -> None:
    bed.start(hold, 1000)
    wait_until(bed.held, "the later one")
    assert bed.run(hold, 0.05) == -signal.SIGKILL


@both
def test_a_restarted_server_serves_the_same_workers(bed: Bed) -> None:
    bed.server.stop()
    bed.server.start()
    assert bed.run(overstay) == -signal.SIGKILL


def test_the_expired_scope_is_named_and_the_worker_described(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    worker = bed.start(overstay)
    worker.join(HUNG)
    # The worker may be gone before the server has said that it killed it.
    wait_until(lambda: sum(r is not None for _, r in bed.events) == 2, "both events")
    assert [(name, r.scope_id) for name, r in bed.events if r] == [
        ("timer expired", "too slow"),
        ("kill worker process", "too slow"),
    ]
    wait_until(lambda: "'too slow'" in caplog.text, "the log line")
    assert f"run run: pid {worker.pid}" in caplog.text
    assert "state S" in caplog.text


def test_a_worker_that_survives_its_signal_keeps_its_other_scopes(bed: Bed) -> None:
    def work(bed: Bed) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        polite, strict = bed.client(signal=signal.SIGUSR1), bed.client()
        strict.acquire("outer", time.time() + 1000)
        polite.acquire("inner", time.time())
        signal.sigwait([signal.SIGUSR1])
        strict.acquire("outer", time.time())
        signal.pause()

    assert bed.run(work) == -signal.SIGKILL


def line(pid: int, at: float, sig: int, started: int = 0) -> bytes:
    """A line as our client writes it."""
    return timer_pipe.encode_line(FileTimerRequest(pid, "strange", at, sig), started)


TORCHS = b'{"version": 1, "pid": %d, "scope_id": "s", "expiration_time": 1, "signal": 18}\n'


def test_garbage_floods_and_foreign_pids_have_no_effect(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    strange = [-1, 0, 1, 2, 2**31, 10**12, dead.pid, os.getppid(), os.getpid()]
    signalled: list[int] = []
    with monkeypatch.context() as patch:
        # As in an agent that uses no timers itself. The signal is harmless if the check fails.
        patch.setattr("phalanx.agent.supervision.timers.watched_processes.client_pids", set())
        patch.setattr(signal, "pidfd_send_signal", lambda *args: signalled.append(args[1]))
        for pid in strange:
            bed.write(line(pid, time.time(), signal.SIGCONT))
            bed.write(TORCHS % pid)
        bed.write(b"half a line without an end")
        bed.write(b"\x00" * 3000 + b"\n" + b"{" * 1000 + b"\n")
        for _ in range(200):
            bed.write(os.urandom(4000).replace(b"\n", b"") + b"\n")
        wait_until(lambda: bed.server.dropped.get("garbage", 0) >= 200, "the end of the flood")
    assert not any(signalled)
    assert bed.run(overstay) == -signal.SIGKILL, "it still works"
    assert bed.run(in_time) == 0
    assert bed.server.dropped["garbage"] >= 200
    assert bed.server.dropped["impossible pid"] >= 2
    assert bed.server.dropped["foreign pid"] >= 4
    assert bed.server.dropped["unknown pid"] >= 2


def test_a_foreign_process_is_never_signalled(bed: Bed) -> None:
    """Signalling it is permitted, but it is not a worker of this server."""
    told = subprocess.run(
        ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    stranger = int(told.stdout)
    try:
        wait_until(lambda: psutil.Process(stranger).ppid() != os.getpid(), "its adoption")
        bed.write(line(stranger, time.time(), signal.SIGKILL))
        assert bed.run(overstay) == -signal.SIGKILL
        assert bed.server.dropped == {"foreign pid": 1}
        assert not gone(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_a_request_of_an_earlier_process_with_the_same_pid_is_dropped(bed: Bed) -> None:
    worker = bed.start(hold, 1000)
    wait_until(bed.held, "the worker")
    bed.write(line(worker.pid, time.time(), signal.SIGKILL, started=12345))
    wait_until(lambda: bed.server.dropped, "the drop")
    assert bed.server.dropped == {"pid of an earlier process": 1}
    assert worker.is_alive()


def test_no_timer_is_kept_of_a_worker_that_dies_while_its_request_is_read(tmp_path: Path) -> None:
    started, registered = threading.Event(), threading.Event()

    class Late(FileTimerServer):
        def register_timers(self, timer_requests: list[Any]) -> None:
            if timer_requests:
                assert started.wait(HUNG)  # the request may come before the fork has returned
                bed.workers[0].kill()
                bed.workers[0].join()
                assert self.get_expired_timers(1e12) == {}
            super().register_timers(timer_requests)
            if timer_requests:
                registered.set()

    bed = Bed("pipe", tmp_path)
    try:
        bed.server.stop()
        bed.server = Late(bed.path, "run")
        bed.server.start()
        bed.start(hold, 1000)
        started.set()
        assert registered.wait(HUNG)
        assert bed.held() == {}
    finally:
        bed.end()


REUSE = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    from phalanx.elastic.timer import FileTimerClient, FileTimerServer
    path = sys.argv[1]
    server = FileTimerServer(path, "run")
    server.start()
    def worker(after):
        pid = os.fork()
        if not pid:
            FileTimerClient(path).acquire("scope", time.time() + after)
            signal.pause()
        while pid not in server.get_expired_timers(1e12):
            pass
        return pid
    first = worker(3.0)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    open("/proc/sys/kernel/ns_last_pid", "w").write(str(first - 1))
    stranger = subprocess.Popen(["sleep", "300"])
    assert stranger.pid == first, (stranger.pid, first)
    second = worker(3.0)  # later than the first one's, which the server has dropped
    os.waitpid(second, 0)
    print("stranger alive" if stranger.poll() is None else "stranger killed")
    server.stop()
    stranger.kill()
    stranger.wait()
    """
)


@as_root
def test_a_process_that_got_a_dead_workers_pid_is_never_signalled(tmp_path: Path) -> None:
    """In a pid namespace of its own, where the next pid can be chosen."""
    done = subprocess.run(
        ["unshare", "-pf", "--mount-proc", sys.executable, "-c", REUSE, str(tmp_path / "pipe")],
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.stdout == "stranger alive\n", done.stderr


def busy(bed: Bed, pairs: int) -> None:
    client = bed.client()
    for _ in range(pairs):
        client.acquire("step", time.time() + 1000)
        client.release("step")
    client.acquire("end", time.time())
    signal.pause()


@both
def test_many_writers_under_load_lose_nothing_and_never_fail(bed: Bed) -> None:
    workers = [bed.start(busy, 3000) for _ in range(6)]
    for worker in workers:
        worker.join(HUNG)
        assert worker.exitcode == -signal.SIGKILL
    assert bed.server.dropped == {}
    wait_until(lambda: not bed.held(), "no timer held")


def test_a_child_of_the_agent_does_not_keep_the_pipe_open(bed: Bed) -> None:
    """Otherwise a worker would write without a reader."""
    bystander = bed.start(lambda bed: signal.pause())
    client = bed.client()
    client.acquire("a", time.time() + 1000)
    bed.server.stop()
    wait_until(lambda: not writes(client), "the end of the pipe")
    assert bystander.is_alive()


def writes(client: Any) -> bool:
    try:
        os.write(client._fd, b"\n")
    except BrokenPipeError:
        return False
    return True


TORCH_WORKER = textwrap.dedent(
    """
    import sys, signal, time
    from torch.distributed.elastic import timer
    timer.configure(timer.FileTimerClient(sys.argv[1]))
    with timer.expires(after=1000, scope="fine"):
        pass
    with timer.expires(after=0.05, scope="torch scope"):
        signal.pause()
    """
)


def test_an_unmodified_torch_worker_is_served(bed: Bed) -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", TORCH_WORKER, bed.path], timeout=4 * HUNG)
    assert done.returncode == -signal.SIGKILL
    assert [r.scope_id for name, r in bed.events if name == "timer expired"] == ["torch scope"]
    assert bed.server.dropped == {}


def torch_queue_worker(bed: Bed) -> None:
    from torch.distributed.elastic import timer

    timer.LocalTimerClient(bed.queue).acquire("torch scope", time.time())
    signal.pause()


@pytest.mark.parametrize("bed", ["queue"], indirect=True)
def test_torchs_client_over_a_queue_is_served(bed: Bed) -> None:
    pytest.importorskip("torch.distributed.elastic.timer")
    assert bed.run(torch_queue_worker) == -signal.SIGKILL


@both
def test_a_server_may_be_started_twice_and_again_after_a_stop(bed: Bed) -> None:
    threads = threading.active_count()
    bed.server.start()
    assert threading.active_count() <= threads
    assert bed.run(overstay) == -signal.SIGKILL
    bed.server.stop()
    bed.server.start()
    bed.server.start()
    assert bed.run(overstay) == -signal.SIGKILL


class Counting(LocalTimerServer):
    """A server with its own way to register: it sees every look, as under torch."""

    def __init__(self, queue: Any, max_interval: float) -> None:
        super().__init__(queue, max_interval)
        self.looks: queue_module.Queue[int] = queue_module.Queue()

    def register_timers(self, timer_requests: list[Any]) -> None:
        self.looks.put(len(timer_requests))
        super().register_timers(timer_requests)


class CountingFile(FileTimerServer):
    def __init__(self, path: str, max_interval: float) -> None:
        super().__init__(path, "run", max_interval)
        self.looks: queue_module.Queue[int] = queue_module.Queue()

    def register_timers(self, timer_requests: list[Any]) -> None:
        self.looks.put(len(timer_requests))
        super().register_timers(timer_requests)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_of_ones_own_looks_once_per_interval(kind: str, tmp_path: Path) -> None:
    queue = FORK.Queue()
    path = str(tmp_path / "pipe")
    server: Any = Counting(queue, 0.1) if kind == "queue" else CountingFile(path, 0.1)
    began = time.monotonic()
    server.start()
    try:
        for _ in range(5):
            server.looks.get(timeout=HUNG)
        assert time.monotonic() - began > 0.35  # never more often without a request
        client = LocalTimerClient(queue) if kind == "queue" else FileTimerClient(path)
        worker = FORK.Process(target=overstay_with, args=(client,))
        worker.start()
        worker.join(HUNG)
        assert worker.exitcode == -signal.SIGKILL
        worker.close()
        seen = []
        while not server.looks.empty():
            seen.append(server.looks.get())
        assert 1 in seen
    finally:
        server.stop()
        queue.close()
        queue.join_thread()
        queue._reader.close()
        queue._writer.close()


def overstay_with(client: Any) -> None:
    with expires(0.05, "scope", client):
        signal.pause()


@pytest.mark.parametrize("module", ["debug_info_logging", "file_based_local_timer"])
def test_a_hook_is_called_while_the_worker_can_be_looked_at(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def hook(run_id: str, expired: dict[int, list[str]]) -> None:
        seen.append((run_id, expired, [psutil.Process(pid).status() for pid in expired]))
        raise RuntimeError("of the hook")

    where = importlib.import_module(f"phalanx.elastic.timer.{module}")
    monkeypatch.setattr(where, "log_debug_info_for_expired_timers", hook)
    path = str(tmp_path / "pipe")
    server = FileTimerServer(path, "run")
    server.start()
    try:
        worker = FORK.Process(target=overstay_with, args=(FileTimerClient(path),))
        worker.start()
        pid = worker.pid
        worker.join(HUNG)
        assert worker.exitcode == -signal.SIGKILL
        worker.close()
    finally:
        server.stop()
    assert len(seen) == 1
    assert seen[0][:2] == ("run", {pid: ["scope"]})
    assert seen[0][2][0] not in ("zombie", "dead")
