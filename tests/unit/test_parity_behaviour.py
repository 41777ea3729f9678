"""The same calls under torch and under Phalanx: the same results, or a difference with its reason.

Each probe gets a library (torch's modules or Phalanx's, at the same paths) and returns plain data. Those that
differ on purpose carry the reason; the table of docs/parity.md is written from this list:

    PHALANX_WRITE_DOCS=1 python -m pytest tests/unit/test_parity_behaviour.py
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import HUNG

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
BEGIN, END = "<!-- behaviour: begin -->\n", "<!-- behaviour: end -->"


class Library:
    """torch.distributed, or Phalanx in its place."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __call__(self, path: str) -> Any:
        """The module at a path below torch.distributed."""
        return importlib.import_module(f"{self.root}.{path}")


class Behaviour(NamedTuple):
    area: str
    what: str
    probe: Callable[[Library], Any]
    differs: str = ""  # what is different here, and why


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the type of the exception, under the name that programs catch it by."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - that is what is compared
        names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return ["raises", names[0]]


@contextlib.contextmanager
def variables(**values: str | None) -> Any:
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        yield
    finally:
        for name, old in before.items():
            os.environ.pop(name, None) if old is None else os.environ.update({name: old})


# -- failures ---------------------------------------------------------------------------------------------


ERRORS = "elastic.multiprocessing.errors"
RECORDS = {
    "a text": '{"message": "boom"}',
    "a text and a time": '{"message": "boom", "timestamp": 7}',
    "time as text": '{"message": {"message": "boom", "extraInfo": {"timestamp": "123"}}}',
    "time as number": '{"message": {"message": "boom", "extraInfo": {"timestamp": 123}}}',
    "time as float": '{"message": {"message": "boom", "extraInfo": {"timestamp": 123.7}}}',
}
SHAPES = {
    "time that is no number": '{"message": {"message": "m", "extraInfo": {"timestamp": "x"}}}',
    "time null": '{"message": {"message": "m", "extraInfo": {"timestamp": null}}}',
    "extraInfo a text": '{"message": {"message": "m", "extraInfo": "x"}}',
    "no extraInfo": '{"message": {"message": "m"}}',
    "empty message": '{"message": {}}',
    "no message": "{}",
    "message null": '{"message": null}',
    "message a number": '{"message": 3}',
    "message a list": '{"message": ["a"]}',
    "a list": "[]",
    "a number": "3",
    "a string": '"text"',
    "null": "null",
}


def failure(lib: Library, content: str | None, code: int = 1) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "error.json")
        if content is not None:
            Path(path).write_text(content)
        return lib(ERRORS).ProcessFailure(0, 77, code, path)


def times(lib: Library) -> Any:
    stamps = {name: failure(lib, text).timestamp for name, text in RECORDS.items() if "time" in name}
    return stamps, {name: type(stamp).__name__ for name, stamp in stamps.items()}


def signal_messages(lib: Library) -> Any:
    return [failure(lib, None, code).message for code in (-9, -11, -15, -6)]


def shapes(lib: Library) -> Any:
    return {
        name: outcome(lambda text=text: failure(lib, text) and "a failure")  # type: ignore[misc]
        for name, text in SHAPES.items()
    }


def without_file(lib: Library) -> Any:
    made = failure(lib, None, 3)
    hint = made.message.partition(" (")[0]
    return hint, made.error_file, made.error_file_data, made.signal_name(), type(made.timestamp).__name__


def recorded(lib: Library) -> Any:
    """What `record` leaves in the error file: for an exception, and for failed children."""
    errors = lib(ERRORS)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        child, own = os.path.join(folder, "child.json"), os.path.join(folder, "own.json")
        Path(child).write_text('{"message": {"message": "inner", "extraInfo": {"timestamp": "5"}}}')

        def run(name: str, error: BaseException) -> None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(own)

            @errors.record
            def main() -> None:
                raise error

            with variables(TORCHELASTIC_ERROR_FILE=own), contextlib.suppress(BaseException):
                main()
            found[name] = json.loads(Path(own).read_text()) if os.path.exists(own) else None

        failed, kind = errors.ProcessFailure, errors.ChildFailedError
        run("exception", ValueError("bad"))
        found["exception"] = found["exception"]["message"]["message"]
        run("SystemExit 0", SystemExit(0))
        run("child with an error file", kind("train.py", {0: failed(0, 77, 138, child)}))
        run("child killed by a signal", kind("train.py", {0: failed(0, 77, -9, "<N/A>")}))
        run("child with an exit code only", kind("train.py", {0: failed(0, 77, 3, "<N/A>")}))
    return found


def first_failure(lib: Library) -> Any:
    errors, made = lib(ERRORS), {}
    for rank, at in ((0, 30), (1, 20), (2, 25)):
        made[rank] = failure(lib, json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": at}}}))
    rank, first = errors.ChildFailedError("train.py", made).get_first_failure()
    return rank, first.timestamp


def report_of_a_signal(lib: Library) -> Any:
    errors = lib(ERRORS)
    text = str(errors.ChildFailedError("train.py", {0: failure(lib, None, -11)}))
    return "SIGSEGV" in text, "Signal 11 (SIGSEGV) received by PID 77" in text, "train.py FAILED" in text


def messages(lib: Library) -> Any:
    return {name: failure(lib, text).message for name, text in RECORDS.items()}


def in_python(lib: Library, code: str) -> str:
    """The output of a program of its own; `ROOT` stands for the library's path."""
    command = [sys.executable, "-c", code.replace("ROOT", lib.root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=3 * HUNG, check=True).stdout


def fault_handler(lib: Library) -> str:
    return in_python(
        lib,
        f"import faulthandler; from ROOT.{ERRORS} import ErrorHandler; before = faulthandler.is_enabled(); "
        "ErrorHandler().initialize(); print(before, faulthandler.is_enabled())",
    )


def own_fault_handler(lib: Library) -> str:
    """Whether a crash is still written to the file that the program has chosen before."""
    return in_python(
        lib,
        f"import faulthandler, os, resource, tempfile; from ROOT.{ERRORS} import ErrorHandler\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "with tempfile.TemporaryFile() as file:\n"
        "    faulthandler.enable(file)\n"
        "    ErrorHandler().initialize()\n"
        "    pid = os.fork()\n"
        "    if not pid: os.abort()\n"
        "    print(os.waitpid(pid, 0)[1], os.fstat(file.fileno()).st_size > 0)\n",
    )


# -- names with an underscore that packages import ----------------------------------------------------------


def roles(lib: Library) -> Any:
    kind = lib("elastic.agent.server.api")._RoleInstanceInfo
    nodes = [kind("trainer", 3, 8), kind("trainer", 1, 8), kind("reader", 9, 1)]
    again = kind.deserialize(nodes[0].serialize())
    ordered = sorted(nodes, key=functools.cmp_to_key(kind.compare))
    return (
        nodes[0].serialize(),
        (again.role, again.rank, again.local_world_size),
        [(node.role, node.rank) for node in ordered],
        [kind.compare(one, other) > 0 for one in nodes for other in nodes],
        [kind.find_role_boundaries(ordered, role) for role in ("trainer", "reader", "none")],
    )


def entrypoint_names(lib: Library) -> Any:
    name = lib("launcher.api")._get_entrypoint_name
    programs = [("python", ["s.py"]), ("/bin/true", []), (None, ["a"]), (roles, [])]
    own = [["-u", "s.py", "x"], ["s.py"], [], ["-m", "package.train", "-x"]]
    return [name(*words) for words in programs] + [name(sys.executable, words) for words in own]


def static_addresses(lib: Library) -> Any:
    of, params = lib("launcher.api")._get_addr_and_port, lib("elastic.rendezvous").RendezvousParameters
    asked = [("static", "h:5"), ("c10d", "h:5"), ("static", "[::1]:5"), ("static", "h"), ("static", "h:x")]
    return [outcome(lambda a=a: of(params(*a, "job", 1, 1))) for a in asked]  # type: ignore[misc]


def configurations(lib: Library) -> Any:
    parse = lib("elastic.rendezvous.utils")._parse_rendezvous_config
    texts = ["a=1,b=2", " a = 1 , b=c=d ", "", "a", "a=", "=b", "a=1,b"]
    return [outcome(lambda text=text: parse(text)) for text in texts]  # type: ignore[misc]


def own_hosts(lib: Library) -> Any:
    matches = lib("elastic.rendezvous.utils")._matches_machine_hostname
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), "192.0.2.1", "0.0.0.0"]
    return [matches(name) for name in names]


def host_name(lib: Library) -> Any:
    return lib("elastic.agent.server.api")._get_fq_hostname()


def tcp_store(lib: Library) -> Any:
    """The one agent serves, the other is a client; both use the same values."""
    made = lib("elastic.rendezvous.c10d_rendezvous_backend")._create_tcp_store
    params = lib("elastic.rendezvous").RendezvousParameters
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"localhost:{port}"
    stores = [made(params("c10d", endpoint, "job", 1, 2, is_host=serves)) for serves in ("true", "false")]
    stores[0].set("key", "value")
    return stores[1].get("key"), stores[1].add("count", 2), type(stores[1]).__name__


# -- programs that bring their own parts ------------------------------------------------------------------


AGENT = """
import json, os, sys, tempfile
from ROOT.elastic.agent.server.api import WorkerSpec
from ROOT.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from ROOT.elastic.multiprocessing import DefaultLogsSpecs
from ROOT.elastic.rendezvous import RendezvousParameters
from ROOT.elastic.rendezvous.registry import get_rendezvous_handler

calls = []

class Agent(LocalElasticAgent):
    def _shutdown(self, *args, **named):
        calls.append("_shutdown")
        super()._shutdown(*args, **named)

    def _log_watchdog_event(self, name, request):
        super()._log_watchdog_event(name, request)

with tempfile.TemporaryDirectory() as folder:
    seen = os.path.join(folder, "seen")
    code = f"import os, sys; open({seen!r}, 'a').write(os.environ['MASTER_ADDR'] + ' ')"
    code += "; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    spec = WorkerSpec(
        "r", 1, handler, entrypoint=sys.executable, args=("-c", code), max_restarts=1, monitor_interval=0.05,
        master_addr="train-0.no-such-domain.invalid",
    )
    result = Agent(spec, DefaultLogsSpecs(os.path.join(folder, "logs"))).run()
    print(json.dumps([result.state.name, calls, open(seen).read()]))
"""


def own_agent(lib: Library) -> Any:
    return json.loads(in_python(lib, AGENT))


NODES = """
import os, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from ROOT.elastic.agent.server.api import WorkerSpec
from ROOT.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from ROOT.elastic.multiprocessing import DefaultLogsSpecs
from ROOT.elastic.rendezvous import RendezvousParameters
from ROOT.elastic.rendezvous.registry import get_rendezvous_handler
from ROOT.elastic.utils.distributed import get_free_port

def node(endpoint, folder, address):
    code = f"import os; open({folder!r} + '/' + os.environ['RANK'], 'w').write(os.environ['MASTER_ADDR'])"
    handler = get_rendezvous_handler(RendezvousParameters("c10d", endpoint, "job", 2, 2))
    more = {"monitor_interval": 0.05, "master_addr": address}
    spec = WorkerSpec("r", 1, handler, entrypoint=sys.executable, args=("-c", code), **more)
    return LocalElasticAgent(spec, DefaultLogsSpecs(os.path.join(folder, "logs"))).run().state.name

with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
    for address in "train-0.no-such-domain.invalid", "192.0.2.1":
        where = f"localhost:{get_free_port()}", folder, address
        states = [done.result() for done in [pool.submit(node, *where) for _ in range(2)]]
        print(states, [open(os.path.join(folder, rank)).read() for rank in "01"])
"""


def two_nodes(lib: Library) -> str:
    return in_python(lib, NODES)


CONTEXT_WORKER = """
import os, sys

path = os.environ["TORCHELASTIC_ERROR_FILE"]
print(path.split(os.sep)[-3:], file=open(os.environ["SEEN"], "a"))
print("loss 1\\nsomething else", flush=True)
if os.environ["FIRST"] == "1":
    if path:
        open(path, "w").write('{"message": "by the worker"}')
    sys.exit(5)
"""

CONTEXT = """
import glob, os, signal, subprocess, sys, tempfile
from ROOT.elastic.agent.server.api import WorkerSpec
from ROOT.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from ROOT.elastic.multiprocessing import DefaultLogsSpecs, Std
from ROOT.elastic.multiprocessing.api import PContext, RunProcsResult, SignalException
from ROOT.elastic.multiprocessing.errors import ProcessFailure
from ROOT.elastic.rendezvous import RendezvousParameters
from ROOT.elastic.rendezvous.registry import get_rendezvous_handler

failures = []

class Own(PContext):
    def _start(self):
        self.started = {}
        for rank, args in self.args.items():
            with open(self.stdouts[rank] or os.devnull, "w") as out:
                env = {**os.environ, **self.envs[rank]}
                self.started[rank] = subprocess.Popen([self.entrypoint, *args], env=env, stdout=out)

    def _poll(self):
        codes = {rank: process.poll() for rank, process in self.started.items()}
        for rank, code in codes.items():
            if code:
                failure = ProcessFailure(rank, self.started[rank].pid, code, self.error_files[rank])
                failures.append((self.error_files[rank].split(os.sep)[-3:], failure.message.split(" (")[0]))
                return RunProcsResult(failures={rank: failure})
        if all(code == 0 for code in codes.values()):
            return RunProcsResult(return_values=dict.fromkeys(codes))

    def _close(self, death_sig, timeout=30):
        for process in self.started.values():
            process.kill()
            process.wait()

    def pids(self):
        return {rank: process.pid for rank, process in self.started.items()}

class Agent(LocalElasticAgent):
    def _start_workers(self, group):
        left = self._remaining_restarts
        envs = {0: {"FIRST": str(left), "TORCHELASTIC_RESTART_COUNT": str(1 - left)}}
        args = {0: ("-c", WORKER)}
        self._pcontext = Own("r", sys.executable, args, envs, self._logs_specs, {0: "<0>"}, FILTER, FILTER)
        self._pcontext.start()
        return self._pcontext.pids()

with tempfile.TemporaryDirectory() as folder:
    os.environ["SEEN"] = os.path.join(folder, "seen")
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error file of the launcher")
    logs = LOGS
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    spec = WorkerSpec("r", 1, handler, entrypoint="x", max_restarts=1, monitor_interval=0.05)
    result = Agent(spec, DefaultLogsSpecs(logs, tee=Std.OUT)).run()
    print(result.state.name, failures, open(os.environ["SEEN"]).read())
    for attempt in "attempt_0", "attempt_1":
        for path in glob.glob(os.path.join(folder, "logs", "*", attempt, "filtered_stdout.log")):
            print(attempt, open(path).read())

    context = Own("r", "true", {0: ()}, {0: {}}, DefaultLogsSpecs(logs))
    context.start()
    try:
        signal.raise_signal(signal.SIGTERM)
    except SignalException as error:
        print(error.sigval.name)
    finally:
        context.close()
"""


def own_processes(lib: Library) -> Any:
    """The same with real workers, for an agent that is given the context: with files, and without."""
    code = CONTEXT.replace("WORKER", repr(CONTEXT_WORKER))
    kinds = ("os.path.join(folder, 'logs')", "['loss']"), ("os.devnull", "None")
    return [in_python(lib, code.replace("LOGS", logs).replace("FILTER", only)) for logs, only in kinds]


MEASURED = """
import collections, json, os, sys, tempfile
from ROOT.elastic import metrics
from ROOT.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from ROOT.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from ROOT.elastic.multiprocessing import DefaultLogsSpecs
from ROOT.elastic.rendezvous import RendezvousParameters
from ROOT.elastic.rendezvous.registry import get_rendezvous_handler

told = []
counts = collections.Counter()

class Handler(metrics.MetricHandler):
    def emit(self, metric_data):
        counts[metric_data.name] += 1

class Polled(LocalElasticAgent):
    def _monitor_workers(self, group):
        return super()._monitor_workers(group)

    def _construct_event(self, state, *args, **named):
        event = super()._construct_event(state, *args, **named)
        if state == "FAILED":
            more = json.loads(event.metadata["metadata"])
            told.append([event.metadata["hostname"], event.metadata["rdzv_backend"], more["exit_code"]])
            told.append(more["worker_pid"] == [int(event.metadata["worker_id"])])
        return event

class Unknown(LocalElasticAgent):
    def _monitor_workers(self, group):
        return RunResult(WorkerState.UNKNOWN)

    def _shutdown(self, *args, **named):
        told.append(self.get_worker_group().state.name)
        super()._shutdown(*args, **named)

metrics.configure(Handler())
for kind in (LocalElasticAgent, Polled, Unknown):
    counts.clear()
    with tempfile.TemporaryDirectory() as folder:
        code = "import os, sys, time; time.sleep(float(os.environ['PAUSE'])); sys.exit(3)"
        handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
        spec = WorkerSpec(
            "r", 1, handler, entrypoint=sys.executable, args=("-c", code), max_restarts=1,
            monitor_interval=0.01,
        )
        try:
            kind(spec, DefaultLogsSpecs(folder)).run()
        except Exception as error:
            told.append(["UNKNOWN" in str(error), counts["workers.r.unknown"]])
            continue  # what is left of a run without a result is more here
    often = {name for name in counts if any(part in name for part in ("monitor", "healthy", "remaining"))}
    looks = sorted(name for name in often if kind is Polled or "monitor" not in name)
    told.append([kind.__name__, looks, sorted((name, counts[name]) for name in counts.keys() - often)])
print(json.dumps(told))
"""


def measured_agents(lib: Library) -> Any:
    """What the agents of three classes leave in metrics, and in the event of a worker that failed."""
    with variables(PAUSE="0.5"):
        return json.loads(in_python(lib, MEASURED))


def own_context(lib: Library) -> Any:
    """A class of a third party that starts the workers itself."""
    api, told = lib("elastic.multiprocessing.api"), []
    results = [None, None, api.RunProcsResult(return_values={0: "done"})]

    class Own(api.PContext):
        def _start(self) -> None:
            told.append("start")

        def _poll(self) -> Any:
            return results.pop(0)

        def _close(self, death_sig: Any, timeout: int = 30) -> None:
            told.append(("close", death_sig.name, timeout))

        def pids(self) -> dict[int, int]:
            return {0: 7}

    with tempfile.TemporaryDirectory() as folder:
        context = Own("own", "program", {0: ()}, {0: {}}, api.DefaultLogsSpecs(folder))
        context.start()
        waited = context.wait(0), context.wait(period=0.01).return_values
        context.close(timeout=5)
    groups = [issubclass(kind, api.PContext) for kind in (api.MultiprocessContext, api.SubprocessContext)]
    return told, waited, context.nprocs, context.pids(), sorted(context.error_files), groups


def no_logs(lib: Library) -> Any:
    multiprocessing = lib("elastic.multiprocessing")
    specs = multiprocessing.DefaultLogsSpecs(os.devnull, multiprocessing.Std.OUT, multiprocessing.Std.ERR)
    envs: dict[int, dict[str, str]] = {0: {}, 1: {}}
    logs = specs.reify(envs)
    paths = (logs.stdouts, logs.stderrs, logs.tee_stdouts, logs.tee_stderrs, logs.error_files)
    files = [path for found in paths for path in found.values() if path not in ("", os.devnull)]
    return files, logs.stdouts, logs.stderrs, logs.error_files, envs


def logs_twice(lib: Library) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        specs, env = lib("elastic.multiprocessing").DefaultLogsSpecs(folder), {"A": "B"}
        first, second = (specs.reify({0: env}).error_files[0] for _ in range(2))
        attempt = Path(first).parents[1]
        env = {name: value.removeprefix(str(attempt)) for name, value in env.items()}
        return first == second, sorted(os.listdir(attempt.parent)), attempt.name, env


class KeysOnlyStore:
    """A store whose `wait` takes keys and nothing else."""

    timeout = None

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> Any:
        self.wait([key])
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[Any]:
        return [self.get(key) for key in keys]

    def add(self, key: str, more: int) -> int:
        with self.changed:
            self.values[key] = self.values.get(key, 0) + more
            self.changed.notify_all()
            return int(self.values[key])

    def wait(self, keys: list[str]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(key in self.values for key in keys), HUNG)

    def set_timeout(self, timeout: Any) -> None:
        self.timeout = timeout


def exchanges(lib: Library) -> Any:
    """Two ranks; the keys that they use, so that a rank of either side can meet one of the other."""
    functions, store = lib("elastic.utils.store"), KeysOnlyStore()

    def rank(number: int) -> Any:
        values = functions.synchronize(store, f"value {number}".encode(), number, 2, "all/")
        functions.barrier(store, 2, "end")
        return values

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2)))
    return found, sorted(store.values)


def errors_of_the_same_type(lib: Library) -> Any:
    endpoint = lib("elastic.rendezvous.utils").parse_rendezvous_endpoint
    backend = lib("elastic.rendezvous.c10d_rendezvous_backend").create_backend
    params = lib("elastic.rendezvous").RendezvousParameters("c10d", "", "job", 1, 1, store_type="file")
    before, tempfile.tempdir = tempfile.tempdir, "/nonexistent"
    try:
        try:
            backend(params)
            kind = ""
        except Exception as error:  # noqa: BLE001 - that is what is compared
            kind = type(error).__name__
    finally:
        tempfile.tempdir = before
    return kind, outcome(lambda: endpoint("~:123", 5)), outcome(lambda: lib(ERRORS).ChildFailedError("x", {}))


# -- values and small functions -----------------------------------------------------------------------------


def redirects(lib: Library) -> Any:
    std = lib("elastic.multiprocessing").Std
    to_map = lib("elastic.multiprocessing").to_map
    texts = ["0", "1", "2", "3", "0:3,1:0", "4", "", "a", "0:1,1:9"]
    read = [outcome(lambda text=text: plain(std.from_str(text))) for text in texts]  # type: ignore[misc]
    return read, plain(to_map(std.OUT, 2)), plain(to_map({1: std.ERR}, 3))


def plain(value: Any) -> Any:
    return {key: int(kind) for key, kind in value.items()} if isinstance(value, dict) else int(value)


def node_counts(lib: Library) -> Any:
    parse = lib("run").parse_min_max_nnodes
    return [outcome(lambda t=t: parse(t)) for t in ("3", "1:4", "1:2:3", "x")]  # type: ignore[misc]


def worker_counts(lib: Library) -> Any:
    count = lib("run").determine_local_world_size
    return [outcome(lambda t=t: count(t)) for t in ("1", "12", "cpu", "many")]  # type: ignore[misc]


def settings(lib: Library) -> Any:
    params = lib("elastic.rendezvous").RendezvousParameters
    made = params("c10d", "h:1", "job", 1, 2, a="1", b="no", c="x", d=" 7", e=True, f=None)
    flags = [outcome(lambda k=k: made.get_as_bool(k)) for k in "abcef"]  # type: ignore[misc]
    numbers = [outcome(lambda k=k: made.get_as_int(k)) for k in "acdf"]  # type: ignore[misc]
    return flags, numbers, made.get("zz", 5), outcome(lambda: params("", "h:1", "job", 1, 2))


def endpoints(lib: Library) -> Any:
    parse = lib("elastic.rendezvous.utils").parse_rendezvous_endpoint
    texts = ["host:7", "host", "[::1]:7", "", None, "10.0.0.1:0", "host:x", "host:99999"]
    return [outcome(lambda text=text: tuple(parse(text, 5))) for text in texts]  # type: ignore[misc]


def words(lib: Library) -> Any:
    macros = lib("elastic.utils").macros
    return macros.substitute(["--rank", "${local_rank}", 3, "x${local_rank}y", "${other}"], "7")


def events(lib: Library) -> Any:
    module = lib("elastic.events")
    event = module.Event("name", module.EventSource.WORKER, 12, {"a": 1, "b": None, "c": "x"})
    again = module.Event.deserialize(event.serialize())
    return json.loads(event.serialize()), (again.name, again.source.value, again.timestamp, again.metadata)


def states(lib: Library) -> Any:
    kind = lib("elastic.agent.server").WorkerState
    return [(state.name, state.value, kind.is_running(state)) for state in kind]


# -- the list ---------------------------------------------------------------------------------------------


BEHAVIOUR = [
    Behaviour("failures", "`ProcessFailure.timestamp`: an int, from the error file", times),
    Behaviour("failures", "`ProcessFailure.message` after a signal", signal_messages),
    Behaviour("failures", "`ProcessFailure` without an error file", without_file),
    Behaviour("failures", "`ProcessFailure` of an error file with the wrong shape", shapes),
    Behaviour(
        "failures",
        "`ProcessFailure.message` of an error file",
        messages,
        "always text, because people print it; in torch an object if the file has one",
    ),
    Behaviour("failures", "`ChildFailedError.get_first_failure`", first_failure),
    Behaviour("failures", "the report of a signal names it", report_of_a_signal),
    Behaviour("failures", "`record`: exceptions and failed children", recorded),
    Behaviour("failures", "`ErrorHandler.initialize` enables faulthandler", fault_handler),
    Behaviour(
        "failures",
        "`ErrorHandler.initialize` where faulthandler is enabled",
        own_fault_handler,
        "left as it is: the report has the stack from the file that was chosen; in torch it goes to stderr",
    ),
    Behaviour("agents", "`agent.server.api._RoleInstanceInfo`", roles),
    Behaviour("agents", "`agent.server.api._get_fq_hostname`", host_name),
    Behaviour("launching", "`launcher.api._get_entrypoint_name`", entrypoint_names),
    Behaviour("launching", "`launcher.api._get_addr_and_port`", static_addresses),
    Behaviour("rendezvous", "`rendezvous.utils._parse_rendezvous_config`", configurations),
    Behaviour("rendezvous", "`rendezvous.utils._matches_machine_hostname`", own_hosts),
    Behaviour("rendezvous", "`c10d_rendezvous_backend._create_tcp_store`", tcp_store),
    Behaviour("rendezvous", "`RendezvousParameters`: settings as flags and numbers", settings),
    Behaviour("rendezvous", "`rendezvous.utils.parse_rendezvous_endpoint`", endpoints),
    Behaviour(
        "agents",
        "a subclass's `_shutdown` at every stop; a `master_addr` that this host does not have",
        own_agent,
    ),
    Behaviour("agents", "two nodes and a `master_addr` that cannot be resolved, or bound", two_nodes),
    Behaviour(
        "events",
        "metrics of agents and of subclasses; exit code, host and back end in events; `UNKNOWN` workers",
        measured_agents,
    ),
    Behaviour("processes", "a third party's subclass of `PContext`", own_context),
    Behaviour("processes", "the same with workers, error files, filters and signals", own_processes),
    Behaviour("processes", "`DefaultLogsSpecs` with `log_dir=os.devnull`", no_logs),
    Behaviour("processes", "`DefaultLogsSpecs.reify` twice, without a start", logs_twice),
    Behaviour(
        "rendezvous", "the keys of `synchronize` and `barrier`; a store whose `wait` takes keys", exchanges
    ),
    Behaviour(
        "rendezvous", "exceptions of a bad endpoint, no temporary files, no failures", errors_of_the_same_type
    ),
    Behaviour("processes", "`Std.from_str`, `to_map`", redirects),
    Behaviour("processes", "`utils.macros.substitute`", words),
    Behaviour("launching", "`run.parse_min_max_nnodes`", node_counts),
    Behaviour("launching", "`run.determine_local_world_size`", worker_counts),
    Behaviour("agents", "`WorkerState` and `is_running`", states),
    Behaviour("events", "`Event.serialize` and `deserialize`", events),
]


@pytest.fixture(scope="module")
def libraries() -> tuple[Library, Library]:
    if importlib.util.find_spec("torch") is None and not os.environ.get("CI"):
        pytest.skip("torch is not installed")
    from torch.distributed import TCPStore

    TCPStore("localhost", 0, is_master=True)  # what its first use leaves open belongs to no test
    return Library("torch.distributed"), Library("phalanx")


@pytest.mark.parametrize("behaviour", BEHAVIOUR, ids=lambda b: f"{b.area}: {b.what}".replace("`", ""))
def test_the_same_as_torch(libraries: tuple[Library, Library], behaviour: Behaviour) -> None:
    theirs, ours = libraries
    expected, found = behaviour.probe(theirs), behaviour.probe(ours)
    if behaviour.differs:
        assert found != expected, "no difference any more: take the reason away"
    else:
        assert found == expected


def table() -> str:
    lines = ["| area | behaviour | difference |", "|---|---|---|"]
    lines += [f"| {b.area} | {b.what} | {b.differs or 'none'} |" for b in BEHAVIOUR]
    return "\n".join(lines) + "\n"


def test_the_page_shows_the_table() -> None:
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    shown, end, after = rest.partition(END)
    assert (begin, end) == (BEGIN, END), f"{PAGE.name} has no place for the table"
    if os.environ.get("PHALANX_WRITE_DOCS"):
        PAGE.write_text(before + begin + table() + end + after)
        return
    assert shown == table(), "write it again: PHALANX_WRITE_DOCS=1 python -m pytest " + os.path.relpath(
        __file__
    )
