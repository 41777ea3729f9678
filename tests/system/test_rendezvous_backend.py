"""A third party's `RendezvousBackend`, and torch's own: handlers, agents, lost nodes."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from phalanx.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from phalanx.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    create_handler,
)
from phalanx.elastic.utils.distributed import create_c10d_store
from phalanx.store.embedded import blob_client
from tests.conftest import HUNG, wait_until
from tests.support.memory_blob import MemoryBlob

SHORT = RendezvousTimeout(timedelta(seconds=HUNG), timedelta(seconds=1))


class Nodes:
    """Handlers in threads, each of which answers what its calls returned."""

    def __init__(self, stack: ExitStack, backend: Any, store: Any, least: int, most: int) -> None:
        self._stack, self._make = stack, (backend, store, least, most)
        self.handlers: list[DynamicRendezvousHandler] = []

    def add(self) -> DynamicRendezvousHandler:
        backend, store, least, most = self._make
        handler = DynamicRendezvousHandler.from_backend(
            "run", store, backend, least, most, "localhost", SHORT
        )
        self._stack.callback(handler.leave)
        self.handlers.append(handler)
        return handler


def in_thread(call: Callable[[], Any]) -> queue.Queue[Any]:
    answer: queue.Queue[Any] = queue.Queue()

    def go() -> None:
        try:
            answer.put(call())
        except Exception as error:  # noqa: BLE001 - handed to the test
            answer.put(error)

    threading.Thread(target=go, daemon=True).start()
    return answer


@pytest.fixture
def store() -> Iterator[Any]:
    made = create_c10d_store(True, "localhost", 0, wait_for_workers=False)
    with made:
        yield made


def formed(answers: list[queue.Queue[Any]]) -> list[Any]:
    return [answer.get(timeout=HUNG) for answer in answers]


def test_rounds_spares_re_forming_and_closing_over_a_blob(store: Any) -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, MemoryBlob(), store, 2, 2)
        one, two = nodes.add(), nodes.add()
        infos = formed([in_thread(one.next_rendezvous), in_thread(two.next_rendezvous)])
        assert sorted(info.rank for info in infos) == [0, 1]
        assert {info.world_size for info in infos} == {2}
        assert one.get_backend() == "memory"
        infos[0].store.set("from", "one")
        assert infos[1].store.get("from") == b"one"
        where = {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}
        assert len(where) == 1

        spare = in_thread(nodes.add().next_rendezvous)
        two.leave()  # the spare takes its place
        wait_until(lambda: one.num_nodes_waiting() > 0, "the round to end")
        again = formed([in_thread(one.next_rendezvous), spare])
        assert sorted(info.rank for info in again) == [0, 1]
        assert not again[0].store.check(["from"])  # each round has its own keys

        assert not one.is_closed()
        one.set_closed()
        assert one.is_closed()
        wait_until(nodes.handlers[2].is_closed, "the other node to see the end")
        with pytest.raises(RendezvousClosedError):
            one.next_rendezvous()
        with pytest.raises(RendezvousClosedError):
            nodes.handlers[2].next_rendezvous()


def test_a_node_that_never_joined_closes_the_job(store: Any) -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, MemoryBlob(), store, 1, 1)
        first = nodes.add()
        first.next_rendezvous()
        nodes.add().set_closed()
        wait_until(first.is_closed, "the job to be closed")


def test_a_state_of_torchrun_is_recognised(store: Any) -> None:
    blob = MemoryBlob()
    blob.state, blob.version = b"\x80\x05pickled", 1
    with ExitStack() as stack:
        handler = Nodes(stack, blob, store, 1, 1).add()
        with pytest.raises(Exception, match="torchrun with this run id"):
            handler.next_rendezvous()


def test_create_handler_takes_the_configuration(store: Any) -> None:
    params = RendezvousParameters(
        "memory",
        "",
        "run",
        1,
        2,
        "localhost",
        join_timeout="7",
        last_call_timeout="1",
        keep_alive_interval="2",
    )
    handler = create_handler(store, MemoryBlob(), params)  # type: ignore[arg-type]  # as a duck
    assert handler.settings.timeout.join == timedelta(seconds=7)
    assert handler.settings.keep_alive_interval == timedelta(seconds=2)
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()
    with pytest.raises(ValueError, match="run"):
        create_handler(store, MemoryBlob(), RendezvousParameters("memory", "", "", 1, 1))  # type: ignore[arg-type]


PROGRAM = """
    import os, sys
    from fileblob import FileBlob
    from phalanx.elastic.agent.server import WorkerSpec
    from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from phalanx.elastic.multiprocessing import DefaultLogsSpecs
    from phalanx.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
    from phalanx.elastic.utils.distributed import create_c10d_store
    from datetime import timedelta

    folder, nodes, worker, interval = sys.argv[1:]
    least, _, most = nodes.partition(":")
    store = create_c10d_store(True, "localhost", 0, wait_for_workers=False)
    handler = DynamicRendezvousHandler.from_backend(
        "job", store, FileBlob(folder), int(least), int(most), "localhost",
        RendezvousTimeout(last_call=timedelta(seconds=1)), keep_alive_interval=int(interval),
    )
    spec = WorkerSpec("trainer", 2, handler, entrypoint="/bin/sh", args=("-c", worker), max_restarts=2)
    result = LocalElasticAgent(spec, DefaultLogsSpecs(folder)).run()
    print("state", result.state.name, sorted(result.return_values), flush=True)
"""
FILEBLOB = """
    import fcntl, os
    from phalanx.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    class FileBlob(RendezvousBackend):
        name = "file"

        def __init__(self, folder):
            self._path = os.path.join(folder, "blob")

        def _locked(self, change):
            with open(self._path, "a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                found = file.read()
                version, state = int.from_bytes(found[:8], "big"), found[8:]
                return change(file, version, state)

        def get_state(self):
            return self._locked(lambda file, version, state: (state, version) if version else None)

        def set_state(self, state, token=None):
            def change(file, version, there):
                if version != (token or 0):
                    return there, version, False
                file.truncate(0)
                file.write((version + 1).to_bytes(8, "big") + state)
                return state, version + 1, True

            return self._locked(change)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "fileblob.py").write_text(textwrap.dedent(FILEBLOB))
    (tmp_path / "logs").mkdir()
    with ExitStack() as stack:

        def begin(nodes: str, worker: str, interval: int = 5) -> subprocess.Popen[str]:
            program, logs = str(tmp_path / "program.py"), str(tmp_path / "logs")
            words = [sys.executable, program, logs, nodes, worker, str(interval)]
            process = stack.enter_context(
                subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
            stack.callback(process.kill)
            return process

        yield begin


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"no {text!r} in {''.join(lines)}")


def test_agents_restart_and_finish_over_a_blob(start: Any, tmp_path: Path) -> None:
    worker = (
        "echo r$RANK/$WORLD_SIZE.$TORCHELASTIC_RESTART_COUNT; "
        f"test $RANK$TORCHELASTIC_RESTART_COUNT != 10 && {{ : > {tmp_path}/ok.$RANK; exit 0; }}; exit 3"
    )
    nodes = [start("2:2", worker) for _ in range(2)]
    ends = [read_until(node, "state ") for node in nodes]
    assert sorted(ends) == ["state SUCCEEDED [0, 1]\n", "state SUCCEEDED [2, 3]\n"]
    assert [node.wait(HUNG) for node in nodes] == [0, 0]


def test_a_lost_node_is_replaced_by_a_spare(start: Any, tmp_path: Path) -> None:
    worker = f"echo up $RANK $WORLD_SIZE; until test -e {tmp_path}/end; do sleep 0.1; done"
    first = start("1:2", worker, 1)
    read_until(first, "up ")
    second = start("1:2", worker, 1)
    read_until(second, "up ")
    second.send_signal(signal.SIGKILL)
    third = start("1:2", worker, 1)
    read_until(third, "up ")
    (tmp_path / "end").touch()
    assert {read_until(node, "state ").split()[1] for node in (first, third)} == {"SUCCEEDED"}


def test_the_same_program_under_torch_and_under_us(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(SAME))
    # With the store that torch shares by default, a late node waits for ever for its address (torch 2.13).
    environ = {**os.environ, "PYTHONWARNINGS": "ignore", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), package],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
                )
            )
            for package in ("torch.distributed", "phalanx")
        ]  # fmt: skip
        for process in both:
            stack.callback(process.kill)
        (theirs, their_errors), (ours, our_errors) = (
            process.communicate(timeout=2 * HUNG) for process in both
        )
    assert ours == theirs, our_errors[-2000:]
    assert "3 nodes" in theirs, their_errors[-2000:]
    assert theirs.endswith("end\n"), their_errors[-2000:]


SAME = """
    import importlib, sys, threading, queue, time
    from datetime import timedelta
    from torch.distributed import HashStore

    package = sys.argv[1]
    rendezvous = importlib.import_module(package + ".elastic.rendezvous")
    dynamic = importlib.import_module(package + ".elastic.rendezvous.dynamic_rendezvous")

    class Mine(dynamic.RendezvousBackend):
        def __init__(self):
            self.lock, self.state, self.version = threading.Lock(), None, 0

        @property
        def name(self):
            return "mine"

        def get_state(self):
            with self.lock:
                return None if self.state is None else (self.state, self.version)

        def set_state(self, state, token=None):
            with self.lock:
                mine = (token or 0) == self.version
                if mine:
                    self.state, self.version = state, self.version + 1
                return self.state, self.version, mine

    def say(*words):
        print(*words, flush=True)

    def make(backend, store, least, most, **limits):
        timeout = dynamic.RendezvousTimeout(
            join=limits.get("join", timedelta(seconds=60)), last_call=timedelta(seconds=1)
        )
        return dynamic.DynamicRendezvousHandler.from_backend(
            "run", store, backend, least, most, "localhost", timeout, 4, 4
        )

    def join(handlers):
        found = queue.Queue()
        def one(handler):
            info = handler.next_rendezvous()
            found.put(info)
        for handler in handlers:
            threading.Thread(target=one, args=(handler,)).start()
        infos = sorted((found.get() for _ in handlers), key=lambda info: info.rank)
        say(len(infos), "nodes", [(info.rank, info.world_size) for info in infos])
        return infos

    backend, store = Mine(), HashStore()
    one, two = make(backend, store, 2, 3), make(backend, store, 2, 3)
    say(one.get_backend(), one.get_run_id(), one.is_closed(), one.num_nodes_waiting())
    say(one.settings.run_id, one.settings.min_nodes, one.settings.max_nodes, one.settings.keep_alive_interval)
    infos = join([one, two])
    infos[0].store.set("key", "value")
    say(infos[1].store.get("key"), type(infos[0].store).__name__)
    say(one.is_closed(), one.num_nodes_waiting())
    three = make(backend, store, 2, 3)
    late = queue.Queue()
    threading.Thread(target=lambda: late.put(three.next_rendezvous())).start()
    while not (one.num_nodes_waiting() and two.num_nodes_waiting()):
        time.sleep(0.05)
    say("waiting", one.num_nodes_waiting())
    found = queue.Queue()
    for handler in (one, two):
        threading.Thread(target=lambda handler=handler: found.put(handler.next_rendezvous())).start()
    infos = sorted([late.get(), found.get(), found.get()], key=lambda info: info.rank)
    say(len(infos), "nodes", [(info.rank, info.world_size) for info in infos], infos[0].store.check(["key"]))
    one.set_closed()
    say(one.is_closed())
    while not (two.is_closed() and three.is_closed()):
        time.sleep(0.05)
    for handler in (one, two, three):
        try:
            handler.next_rendezvous()
        except rendezvous.RendezvousClosedError as error:
            say(type(error).__name__)
    say([handler.shutdown() for handler in (one, two, three)])

    lonely = make(Mine(), HashStore(), 2, 2, join=timedelta(seconds=2))
    try:
        lonely.next_rendezvous()
    except rendezvous.RendezvousTimeoutError as error:
        say(type(error).__name__)
    lonely.shutdown()
    never = make(Mine(), HashStore(), 2, 2)
    say(never.shutdown(), never.is_closed())

    params = rendezvous.RendezvousParameters("mine", "", "run", 1, 1, "localhost", last_call_timeout="1")
    made = dynamic.create_handler(HashStore(), Mine(), params)
    info = made.next_rendezvous()
    say(info.rank, info.world_size, made.get_backend())
    say(made.shutdown())
    for wrong in (("", 1, 1), ("run", 0, 1), ("run", 2, 1)):
        try:
            dynamic.DynamicRendezvousHandler.from_backend(wrong[0], HashStore(), Mine(), *wrong[1:])
        except ValueError:
            say("ValueError")
    say("end")
"""


def check_backend(store: Any) -> None:
    backend = C10dRendezvousBackend(store, "run")
    assert backend.name == "c10d"
    assert backend.get_state() is None
    value, token, was_set = backend.set_state(b"x" * 100) or (b"", None, False)
    assert was_set
    assert backend.get_state() == (value, token)
    assert backend.set_state(b"y") == (value, token, False)
    assert backend.set_state(b"y", "another") == (value, token, False)
    assert backend.set_state(b"y", 5) == (value, token, False)
    assert (backend.set_state(b"y", token) or (b"", b"", False))[2]
    store.set("torch.rendezvous.bad", "?")
    with pytest.raises(RendezvousStateError, match=r"torch\.rendezvous\.bad"):
        C10dRendezvousBackend(store, "bad").get_state()


def test_torchs_backend_over_a_store_of_ours(store: Any) -> None:
    check_backend(store)


def test_torchs_backend_over_any_of_torchs_stores(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = f"""
        import sys
        from contextlib import ExitStack
        import torch.distributed as dist
        from phalanx.elastic.rendezvous import RendezvousParameters
        from phalanx.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
        from tests.system.test_rendezvous_backend import Nodes, check_backend, formed, in_thread

        file = RendezvousParameters("c10d", {str(tmp_path / "file")!r}, "run", 1, 1, store_type="file")
        tcp = RendezvousParameters("c10d", "localhost:0", "run", 1, 1)
        stores = [dist.HashStore(), *(create_backend(one)[1] for one in (file, tcp))]
        for store in stores:
            print(type(store).__name__)
            check_backend(dist.PrefixStore("check", store))
            with ExitStack() as stack:
                nodes = Nodes(stack, C10dRendezvousBackend(store, "job"), store, 2, 2)
                infos = formed([in_thread(nodes.add().next_rendezvous) for _ in range(2)])
                assert sorted(info.rank for info in infos) == [0, 1]
                assert all(isinstance(info.store, dist.PrefixStore) for info in infos)
        second = RendezvousParameters("c10d", f"localhost:{{stores[2].port}}", "job", 1, 1)
        state = create_backend(second)[0].get_state()  # this machine's, and served already
        assert state[0].startswith(b"PHALANX"), state
        print("end")
    """
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=2 * HUNG
    )
    assert made.stdout.split() == ["HashStore", "FileStore", "TCPStore", "end"], made.stderr[-3000:]


def test_bad_parameters_of_torchs_backend() -> None:
    with pytest.raises(ValueError, match="store_type=ring"):
        create_backend(RendezvousParameters("c10d", "localhost:0", "run", 1, 1, store_type="ring"))
    with pytest.raises(ValueError, match="read_timeout"):
        create_backend(RendezvousParameters("c10d", "localhost:0", "run", 1, 1, read_timeout=-1))
    with pytest.raises(ValueError, match="run id"):
        C10dRendezvousBackend(None, "")


class ReadOnlyBlob(MemoryBlob):
    """Answers every read, and takes no write: it refuses it, raises, or never returns."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.end = how, threading.Event()

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        if self.how == "raises":
            raise PermissionError("read only")
        if self.how == "hangs":
            self.end.wait()
        return None


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("refuses", RendezvousTimeoutError, "'memory' has taken no write of this node for 1 s"),
        ("raises", RendezvousConnectionError, "has not answered for 1 s .PermissionError: read only."),
        ("hangs", RendezvousTimeoutError, "no answer from the rendezvous backend 'memory'"),
    ],
)
def test_the_time_to_join_is_kept_over_a_backend_that_takes_no_write(
    how: str, error: type[Exception], words: str
) -> None:
    blob = ReadOnlyBlob(how)
    timeout = RendezvousTimeout(timedelta(seconds=1), timedelta(seconds=1))
    handler = DynamicRendezvousHandler.from_backend("run", None, blob, 1, 1, "localhost", timeout)  # type: ignore[arg-type]
    try:
        found = in_thread(handler.next_rendezvous).get(timeout=HUNG)
        assert isinstance(found, error)
        assert re.search(words, str(found))
        assert handler.is_closed() == (error is RendezvousTimeoutError)
        handler.leave()
    finally:
        blob.end.set()


class ContendedBlob(MemoryBlob):
    """Another node is ahead of the first writes."""

    ahead = 8

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        if self.ahead:
            self.ahead -= 1
            return None
        return super().set_state(state, token)


@pytest.mark.parametrize("most", [0.0, 100.0])
def test_a_refused_write_waits_as_long_as_was_asked_for(
    most: float, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(blob_client, "time", SimpleNamespace(sleep=pauses.append))  # 400 s, else
    handler = DynamicRendezvousHandler.from_backend(
        "run", store, ContendedBlob(), 1, 1, "localhost", SHORT, cas_backoff_max_seconds=most
    )
    try:
        handler.next_rendezvous()
    finally:
        handler.leave()
    assert len(pauses) >= ContendedBlob.ahead
    assert max(pauses) <= max(most, 0.2)
    assert (max(pauses) > 0.2) == bool(most), "drawn at random: all eight so short, once in 10^21 runs"
