"""Timer clients, lines and frames, queues and servers: what needs no second process."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.agent.supervision.timers import timer_pipe
from phalanx.elastic import timer
from phalanx.elastic.timer import api, debug_info_logging, file_based_local_timer, local_timer
from tests.conftest import HUNG, wait_until

FORK = multiprocessing.get_context("fork")  # spawn would leave its resource tracker running


class ImportRecorder(timer.TimerClient):
    """Records its requests and the timers held."""

    def __init__(self) -> None:
        self.held: dict[str, float] = {}
        self.said: list[str] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.held[scope_id] = expiration_time
        self.said.append(f"+{scope_id}")

    def release(self, scope_id: str) -> None:
        del self.held[scope_id]
        self.said.append(f"-{scope_id}")


def close(q: Any) -> None:
    q.close()
    q.join_thread()


def fill(client: timer.TimerClient) -> None:
    for _ in range(100_000):
        client.acquire("x" * 1000, 5.0)


# ---- names


@pytest.mark.parametrize(
    ("what", "signature"),
    [
        (timer.TimerRequest, "worker_id, scope_id, expiration_time"),
        (timer.FileTimerRequest, "worker_pid, scope_id, expiration_time, signal=0"),
        (timer.TimerServer, "request_queue, max_interval, daemon=True"),
        (timer.LocalTimerServer, "mp_queue, max_interval=60, daemon=True"),
        (timer.LocalTimerClient, "mp_queue"),
        (timer.FileTimerClient, f"file_path, signal={signal.SIGKILL!r}"),
        (timer.FileTimerServer, "file_path, run_id, max_interval=10, daemon=True, log_event=None"),
        (timer.configure, "timer_client"),
        (timer.expires, "after, scope=None, client=None"),
        (local_timer.MultiprocessingRequestQueue, "mp_queue"),
        (api.RequestQueue.get, "self, size, timeout"),
        (debug_info_logging.log_debug_info_for_expired_timers, "run_id, expired_timers"),
        (file_based_local_timer.FileTimerServer.get_expired_timers, "self, deadline"),
        (file_based_local_timer.FileTimerServer.is_process_running, "pid"),
    ],
)
def test_signatures_are_torchs(what: Callable[..., Any], signature: str) -> None:
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(what).parameters.values()]
    assert ", ".join(map(str, bare)) == signature


def test_the_abstract_classes_cannot_be_made() -> None:
    for abstract in (timer.TimerClient, api.RequestQueue, timer.TimerServer):
        with pytest.raises(TypeError, match="abstract"):
            abstract()


# ---- expires


def test_without_a_client_the_error_advises_configure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_configured", None)
    with pytest.raises(RuntimeError, match="configure"), timer.expires(after=1):
        raise AssertionError("never entered")


def test_the_configured_client_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ImportRecorder()
    monkeypatch.setattr(api, "_configured", None)
    timer.configure(client)
    before = time.time()
    with timer.expires(after=60, scope="step"):
        assert before + 60 <= client.held["step"] <= time.time() + 60
    assert client.said == ["+step", "-step"]


def test_nested_scopes_of_several_names_are_independent() -> None:
    client = ImportRecorder()
    with timer.expires(60, "a", client):
        with timer.expires(30, "b", client), timer.expires(10, "c", client):
            assert list(client.held) == ["a", "b", "c"]
        assert list(client.held) == ["a"]
    assert not client.held


def test_each_entry_and_exit_of_a_nested_scope_begins_its_time_again() -> None:
    client = ImportRecorder()

    def left() -> float:
        assert list(client.held) == ["a"]
        return client.held["a"] - time.time()

    with timer.expires(100, "a", client):
        with timer.expires(1000, "a", client):
            assert 100 < left() <= 1000
            with timer.expires(10, "a", client):
                assert left() <= 10
            assert 100 < left() <= 1000
        assert 10 < left() <= 100
    assert not client.held
    with timer.expires(10, "a", client):
        assert left() <= 10


def test_scopes_of_one_name_in_several_tasks_are_independent() -> None:
    client = ImportRecorder()

    async def task(entered: asyncio.Event, end: asyncio.Event) -> None:
        with timer.expires(60, "a", client), timer.expires(60, "a", client):
            entered.set()
            await end.wait()

    async def both() -> None:
        events = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
        tasks = [asyncio.create_task(task(*pair)) for pair in events]
        for entered, _ in events:
            await entered.wait()
        assert list(client.held) == ["a", "a (2)"]
        events[0][1].set()
        await tasks[0]
        assert list(client.held) == ["a (2)"]
        events[1][1].set()
        await tasks[1]

    asyncio.run(both())
    assert not client.held


def test_scopes_without_a_name_are_named_by_their_place() -> None:
    client = ImportRecorder()

    def deeper(levels: int) -> None:
        with timer.expires(60, client=client):
            if levels:
                deeper(levels - 1)
            else:
                (scope,) = client.held
                assert Path(__file__).name in scope

    deeper(3)
    assert not client.held


def test_concurrent_scopes_of_one_name_are_independent() -> None:
    client, inside = ImportRecorder(), threading.Barrier(8)

    @timer.expires(60, "shared", client)
    def work() -> None:
        inside.wait(HUNG)
        assert len(client.held) == 8
        inside.wait(HUNG)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not client.held
    assert "+shared" in client.said


def test_a_scope_is_released_when_its_block_raises() -> None:
    client = ImportRecorder()
    with pytest.raises(KeyError), timer.expires(60, "a", client):
        raise KeyError
    assert not client.held


def test_a_name_is_free_again_when_its_acquire_failed() -> None:
    class Broken(ImportRecorder):
        def acquire(self, scope_id: str, expiration_time: float) -> None:
            self.said.append(scope_id)
            raise BrokenPipeError

    client = Broken()
    for _ in range(2):
        with pytest.raises(BrokenPipeError), timer.expires(60, "a", client):
            pass
    assert client.said == ["a", "a"]


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        timer.expires(float("nan"), "a", ImportRecorder())


# ---- lines of the pipe

any_scope = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["\x1e", "a\tb", "\\n", "\\\\n\n", "x" * 9000, "é" * 5000, "-", ""]
)


def acquire(scope: str, at: float = 5, sig: int = 9, pid: int = 9, started: int = 1) -> bytes:
    """The line of a request."""
    request = timer.FileTimerRequest(pid, scope, at, sig)
    return timer_pipe.encode_line(request, started)


@given(any_scope, st.integers(2, 2**31 - 1), st.floats(0, 1e11), st.integers(0, 64))
def test_lines_round_trip(scope: str, pid: int, at: float, sig: int) -> None:
    line = acquire(scope, at, sig, pid=pid, started=77)
    assert len(line) <= timer_pipe.MAX_LINE
    assert line.count(b"\n") == 1
    (found,) = timer_pipe.LineReader().feed(line)
    assert (found.worker_pid, found.signal, found.started) == (pid, sig, 77)
    assert found.expiration_time == pytest.approx(at, abs=1e-4)
    assert found.scope_id == scope or len(scope.encode()) > 3000
    (gone,) = timer_pipe.LineReader().feed(acquire(scope, timer_pipe.RELEASE, pid=pid))
    assert gone.expiration_time < 0
    assert gone.scope_id == found.scope_id


def test_long_scopes_stay_distinct() -> None:
    lines = {acquire("x" * 9000 + end) for end in ("a", "b")}
    assert len(lines) == 2


@given(st.lists(st.sampled_from(["a", "b"]), max_size=20), st.data())
def test_chunks_of_any_size_give_the_same_state(scopes: list[str], data: st.DataObject) -> None:
    held: dict[str, bool] = {}
    stream = b""
    for scope in scopes:
        held[scope] = data.draw(st.booleans())
        stream += acquire(scope, 5 if held[scope] else timer_pipe.RELEASE)
    reader, got = timer_pipe.LineReader(), {}
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        for request in reader.feed(stream[:size]):
            got[request.scope_id] = request.expiration_time >= 0
        stream = stream[size:]
    assert got == held
    assert reader.garbage == 0


@given(st.binary(max_size=300).filter(lambda b: b"\n" not in b))
def test_garbage_damages_no_other_line(garbage: bytes) -> None:
    good = acquire("good")
    reader = timer_pipe.LineReader()
    assert "good" in [r.scope_id for r in reader.feed(garbage + good)], "half a line in front"
    assert "good" in [r.scope_id for r in reader.feed(garbage + b"\n" + good)]


def test_a_partial_line_damages_no_other_line() -> None:
    good = acquire("good")
    other = acquire("half")
    for cut in range(1, len(other)):
        reader = timer_pipe.LineReader()
        assert [r.scope_id for r in reader.feed(other[:cut] + good)] == ["good"], other[:cut]
        assert reader.garbage == 1


def test_endless_lines_are_discarded() -> None:
    reader = timer_pipe.LineReader()
    for _ in range(100):
        reader.feed(b"x" * 65536)
    assert reader.garbage == 100
    (found,) = reader.feed(b"\n" + acquire("good"))
    assert found.scope_id == "good"


TORCHS = b'{"version": 1, "pid": 42, "scope_id": "s\\"c\\n", "expiration_time": %s, "signal": %d}\n'


def test_lines_of_torchs_client_are_read() -> None:
    reader = timer_pipe.LineReader()
    (found,) = reader.feed(TORCHS % (b"1794740178.477556", 9))
    assert (found.worker_pid, found.scope_id, found.signal) == (42, 's"c\n', 9)
    assert found.expiration_time == pytest.approx(1794740178.477556, abs=1e-4)
    (found,) = reader.feed(b'{"version": 1, "pi' + TORCHS % (b"-1", 0))
    assert found.expiration_time < 0


@pytest.mark.parametrize(
    "line",
    [
        b"rubbish",
        b"{}",
        b"[]",
        b'"x"',
        b"{" * 100_000,
        b'{"pid": "1", "scope_id": "a", "expiration_time": 1, "signal": 9}',
        b'{"pid": -1, "scope_id": "a", "expiration_time": 1, "signal": 9}',
        b'{"pid": true, "scope_id": "a", "expiration_time": 1, "signal": 9}',
        b'{"pid": 5, "scope_id": ["a"], "expiration_time": 1, "signal": 9}',
        b'{"pid": 5, "scope_id": "a", "expiration_time": NaN, "signal": 9}',
        b'{"pid": 5, "scope_id": "a", "expiration_time": 1, "signal": 999}',
        b'{"pid": 5, "scope_id": "a", "expiration_time": "never", "signal": 9}',
        b'{"pid": 5, "scope_id": "a", "expiration_time": 1%s, "signal": 9}' % (b"0" * 400),
        b'{"pid": 5, "scope_id": "a", "expiration_time": 1, "signal": 9, "started": "x"}',
        b'{"pid": 5, "scope_id": "a", "signal": 9}',
        b"\x00\xff\xfe\t\t\t",
    ],
)
def test_a_bad_line_is_dropped_alone_and_counted(line: bytes) -> None:
    reader = timer_pipe.LineReader()
    good = acquire("good")
    assert [r.scope_id for r in reader.feed(line + b"\n" + good)] == ["good"]
    assert reader.garbage >= 1


def test_file_request_json_is_torchs() -> None:
    request = timer.FileTimerRequest(1, "a", 2.0, signal.SIGKILL)
    assert request.to_json() == (
        '{"version": 1, "pid": 1, "scope_id": "a", "expiration_time": 2.0, "signal": 9}'
    )


# ---- frames of the queue


@given(any_scope, st.integers(2, 2**31 - 1), st.floats(0, 1e11))
@settings(max_examples=50)
def test_frames_round_trip(scope: str, pid: int, at: float) -> None:
    frame = local_timer.encode_frame(acquire(scope, at, pid=pid, started=77))
    assert len(frame) <= 4096
    line = local_timer.FrameReader().feed(frame)
    for found in (pickle.loads(frame[4:]), *timer_pipe.LineReader().feed(line)):
        assert (found.worker_id, found.started) == (pid, 77)
        assert found.expiration_time == pytest.approx(at, abs=1e-4)
        assert found.scope_id == scope or len(scope.encode()) > 3000


class Evil:
    """Would run code when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.path.join(os.environ["TMPDIR"], "evil"),)


def test_only_requests_are_unpickled() -> None:
    assert read(pickle.dumps(Evil()), pickle.dumps(timer.TimerRequest(5, "a", 1.0))) == [
        timer.TimerRequest(5, "a", 1.0)
    ]
    assert not os.path.exists(os.path.join(os.environ["TMPDIR"], "evil"))


def read(*bodies: bytes) -> list[Any]:
    """The requests in frames of these pickles."""
    frames = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    return timer_pipe.LineReader().feed(local_timer.FrameReader().feed(frames))


def test_frames_in_pieces_are_read_and_impossible_lengths_dropped() -> None:
    line = acquire("a")
    frame, reader = local_timer.encode_frame(line), local_timer.FrameReader()
    for byte in frame[:-1]:
        assert reader.feed(bytes([byte])) == b""
    assert reader.feed(frame[-1:] + frame) == line + line
    assert reader.feed(b"\xff" * 100) == b"?\n"
    assert reader.feed(frame) == line


def test_torchs_requests_are_read_without_torch() -> None:
    torch_api = pytest.importorskip("torch.distributed.elastic.timer.api")
    assert read(pickle.dumps(torch_api.TimerRequest(5, "a", 1.0))) == [timer.TimerRequest(5, "a", 1.0)]


@pytest.mark.parametrize("make", [FORK.Queue, lambda: FORK.Queue(100), FORK.JoinableQueue])
def test_a_client_through_a_queue(make: Callable[[], Any]) -> None:
    q = make()
    client, source = timer.LocalTimerClient(q), local_timer.MultiprocessingRequestQueue(q)
    client.acquire("a", 5.0)
    client.release("a")
    client.acquire("b", 6.0)
    wait_until(lambda: source.size() == 3, "three requests")
    me = os.getpid()
    assert source.get(2, HUNG) == [timer.TimerRequest(me, "a", 5.0), timer.TimerRequest(me, "a", -1)]
    assert source.get(5, 0.1) == [timer.TimerRequest(me, "b", 6.0)]
    assert source.get(1, 0) == []
    assert source.size() == 0
    source.close()
    close(q)


def test_the_queues_own_get_returns_a_request() -> None:
    q = FORK.Queue()
    timer.LocalTimerClient(q).acquire("a", 5.0)
    assert q.get(timeout=HUNG) == timer.TimerRequest(os.getpid(), "a", 5.0)
    close(q)


def test_garbage_in_a_queue_is_dropped_alone() -> None:
    q = FORK.Queue()
    source = local_timer.MultiprocessingRequestQueue(q)
    for thing in ("rubbish", None, timer.TimerRequest("me", "a", 1.0), timer.TimerRequest(5, "good", 1.0)):
        q.put(thing)
    assert source.get(1, HUNG) == [timer.TimerRequest(5, "good", 1.0)]
    assert source.garbage == 3
    source.close()
    close(q)


def test_a_full_queue_is_waited_for_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.elastic.timer.local_timer.WRITE_TIMEOUT", 0.05)
    q = FORK.Queue(2)
    client = timer.LocalTimerClient(q)
    client.acquire("a", 5.0)
    client.acquire("b", 5.0)
    with pytest.raises(TimeoutError, match="stuck"):
        client.acquire("c", 5.0)
    q.get(timeout=HUNG)
    client.acquire("c", 5.0)
    close(q)


def test_a_full_pipe_of_a_queue_is_waited_for_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.elastic.timer.local_timer.WRITE_TIMEOUT", 0.05)
    q = FORK.Queue()
    client, source = timer.LocalTimerClient(q), local_timer.MultiprocessingRequestQueue(q)
    with pytest.raises(TimeoutError, match="stuck"):
        fill(client)
    held = source.size()
    assert len(source.get(held, HUNG)) == held, "all requests have arrived"
    source.close()
    close(q)


# ---- servers by their public methods


def servers(tmp_path: Path) -> list[Any]:
    return [
        timer.LocalTimerServer(queue.Queue()),
        timer.FileTimerServer(str(tmp_path / "pipe"), "run"),
    ]


def test_timers_are_kept_released_and_cleared(tmp_path: Path) -> None:
    for server in servers(tmp_path):
        make = timer.FileTimerRequest if isinstance(server, timer.FileTimerServer) else timer.TimerRequest
        server.register_timers([make(1, "a", 5.0), make(1, "b", 9.0), make(2, "a", 7.0)])
        assert server.get_expired_timers(4.9) == {}
        assert server.get_expired_timers(7.0) == {1: [make(1, "a", 5.0)], 2: [make(2, "a", 7.0)]}
        server.register_timers([make(1, "a", -1)])
        assert server.get_expired_timers(100.0) == {1: [make(1, "b", 9.0)], 2: [make(2, "a", 7.0)]}
        server.clear_timers({1})
        assert server.get_expired_timers(100.0) == {2: [make(2, "a", 7.0)]}


@pytest.mark.parametrize("pid", [-1, 0, 1, 2**22 + 5, 2**40])
def test_impossible_pids_are_never_signalled(
    pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> None:
        raise AssertionError(f"signalled {args}")

    monkeypatch.setattr(os, "kill", never)
    monkeypatch.setattr(signal, "pidfd_send_signal", never)
    local, file = servers(tmp_path)
    local._reap_worker(pid)
    file._reap_worker(pid, signal.SIGKILL)
    file.register_timers([timer.FileTimerRequest(pid, "a", 1.0, 9)])
    file.run_once()
    assert file.dropped == {"no worker of this server": 1}
    file.stop()


def test_a_jump_of_the_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    server = timer.FileTimerServer(str(tmp_path / "p"), "run", log_event=lambda name, _: events.append(name))
    client = timer.FileTimerClient(str(tmp_path / "p"), signal=0)
    server.run_once()
    client.acquire("a", time.time() + 1000)
    server.run_once()
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 86_400)
    server.run_once()
    assert "timer expired" not in events
    client.acquire("b", time.time() - 1)
    server.run_once()
    assert events.count("timer expired") == 1
    server.stop()


class Memory(api.RequestQueue):
    """A queue of unknown type."""

    def __init__(self) -> None:
        self.q: queue.Queue[Any] = queue.Queue()

    def size(self) -> int:
        return self.q.qsize()

    def get(self, size: int, timeout: float) -> list[Any]:
        try:
            return [self.q.get(timeout=timeout) if timeout else self.q.get_nowait()]
        except queue.Empty:
            return []


class Simple(timer.TimerServer):
    """A server with its own storage."""

    def __init__(self, source: api.RequestQueue) -> None:
        super().__init__(source, max_interval=0.2)
        self.timers: dict[tuple[Any, str], Any] = {}
        self.reaped: queue.Queue[Any] = queue.Queue()
        self.refuse = 0

    def register_timers(self, timer_requests: list[Any]) -> None:
        for request in timer_requests:
            self.timers[request.worker_id, request.scope_id] = request

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self.timers = {k: v for k, v in self.timers.items() if k[0] not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {}
        for request in self.timers.values():
            if 0 <= request.expiration_time <= deadline:
                found.setdefault(request.worker_id, []).append(request)
        return found

    def _reap_worker(self, worker_id: Any) -> bool:
        if worker_id == "bad":
            raise RuntimeError("cannot")
        self.refuse -= 1
        if self.refuse >= 0:
            return False
        self.reaped.put(worker_id)
        return True


def test_a_third_party_server(caplog: pytest.LogCaptureFixture) -> None:
    source = Memory()
    server = Simple(source)
    server.start()
    source.q.put("rubbish")
    source.q.put(timer.TimerRequest("bad", "s", time.time()))
    source.q.put(timer.TimerRequest("w1", "s", time.time()))
    assert server.reaped.get(timeout=HUNG) == "w1"
    server.refuse = 1
    source.q.put(timer.TimerRequest("w2", "s", time.time()))
    assert server.reaped.get(timeout=HUNG) == "w2", "tried again after a refusal"
    server.stop()
    assert "'s'" in caplog.text


# ---- the pipe itself


def test_the_pipe_is_private(tmp_path: Path) -> None:
    path = timer_pipe.private_path()
    server = timer.FileTimerServer(path, "run")
    server.start()
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    server.stop()
    assert not os.path.exists(path)


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_other_files_are_refused_and_not_touched(kind: str, tmp_path: Path) -> None:
    path, target = tmp_path / "pipe", tmp_path / "target"
    target.write_text("precious")
    if kind == "file":
        path.write_text("precious")
    elif kind == "link":
        path.symlink_to(target)
    else:
        path.mkdir()
    with pytest.raises(FileExistsError, match="named pipe"):
        timer.FileTimerServer(str(path), "run").start()
    assert os.path.lexists(path)
    assert target.read_text() == "precious"


def test_without_a_server_acquire_fails_and_release_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_based_local_timer, "SERVER_TIMEOUT", 0.02)
    client = timer.FileTimerClient(str(tmp_path / "pipe"))
    with pytest.raises(BrokenPipeError, match="server"):
        client.acquire("a", 1.0)
    client.release("a")
    with pytest.raises(BrokenPipeError), timer.expires(60, "a", client):
        pass


def test_a_client_never_writes_into_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / "pipe").write_text("precious")
    with pytest.raises(FileExistsError, match="not a named pipe"):
        timer.FileTimerClient(str(tmp_path / "pipe")).acquire("a", 1.0)
    assert (tmp_path / "pipe").read_text() == "precious"


def test_a_client_waits_for_a_server_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_based_local_timer, "SERVER_TIMEOUT", HUNG)
    client = timer.FileTimerClient(str(tmp_path / "pipe"))
    thread = threading.Thread(target=client.acquire, args=("a", time.time() + 1000))
    thread.start()
    server = timer.FileTimerServer(str(tmp_path / "pipe"), "run")
    server.start()
    thread.join(HUNG)
    wait_until(lambda: server.get_expired_timers(1e12), "the request")
    server.stop()


def test_a_stuck_reader_never_blocks_a_writer_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_based_local_timer, "WRITE_TIMEOUT", 0.05)
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    client = timer.FileTimerClient(path)
    with pytest.raises(TimeoutError, match="stuck"):
        fill(client)
    os.close(reader)


def test_clients_find_a_restarted_server(tmp_path: Path) -> None:
    path = str(tmp_path / "pipe")
    client = timer.FileTimerClient(path)
    for _ in range(3):
        server = timer.FileTimerServer(path, "run")
        server.start()
        client.acquire("a", time.time() + 1000)
        wait_until(lambda server=server: server.get_expired_timers(1e12), "the request")
        server.start()  # it runs already
        server.stop()
        server.stop()


def test_a_server_can_be_started_again_and_is_alive_while_idle(tmp_path: Path) -> None:
    server = timer.FileTimerServer(str(tmp_path / "pipe"), "run")
    for _ in range(2):
        server.start()
        assert abs(server.get_last_progress_time() - time.time()) < HUNG
        server.stop()
    q = FORK.Queue()
    local = timer.LocalTimerServer(q)
    for number in range(2):
        local.start()
        timer.LocalTimerClient(q).acquire(f"s{number}", time.time() + 1000)
        wait_until(lambda: local.get_expired_timers(1e12), "the request")
        local.stop()
    close(q)


def test_a_stalled_server_shows_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.agent.supervision.timers.watchdog._STALLED", 0.0)
    stuck, go = threading.Event(), threading.Event()

    def block(name: str, request: object) -> None:
        if name == "timer expired":
            stuck.set()
            go.wait(HUNG)

    server = timer.FileTimerServer(str(tmp_path / "pipe"), "run", log_event=block)
    server.start()
    timer.FileTimerClient(str(tmp_path / "pipe"), signal=0).acquire("a", time.time())
    assert stuck.wait(HUNG)
    first = server.last_progress()
    wait_until(lambda: time.time() > first, "the clock")
    assert server.last_progress() == first
    go.set()
    server.stop()


def test_a_listener_that_raises_does_not_stop_the_server(tmp_path: Path) -> None:
    heard: queue.Queue[str] = queue.Queue()

    def listen(name: str, request: Any) -> None:
        heard.put(f"{name} {request.scope_id if request else ''}".strip())
        raise KeyError(name)

    server = timer.FileTimerServer(str(tmp_path / "pipe"), "run", log_event=listen)
    server.start()
    client = timer.FileTimerClient(str(tmp_path / "pipe"), signal=0)
    client.acquire("a", time.time())
    client.acquire("b", time.time())
    got = [heard.get(timeout=HUNG) for _ in range(3)]
    assert got == ["watchdog started", "timer expired a", "timer expired b"]
    server.stop()
    assert heard.get(timeout=HUNG) == "watchdog stopped"


def test_debug_info_names_run_pid_scopes_and_state(caplog: pytest.LogCaptureFixture) -> None:
    debug_info_logging.log_debug_info_for_expired_timers("my-run", {os.getpid(): ["load", "save"]})
    assert all(word in caplog.text for word in ("my-run", str(os.getpid()), "'load', 'save'", "state R"))
