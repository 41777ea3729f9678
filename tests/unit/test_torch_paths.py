"""torch's import paths for agent, rendezvous, utils, launcher and run: the same names, the same shapes.

The installed torch is asked what there is; what is left out on purpose is listed here, with the reason.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phalanx import elastic, run
from phalanx.elastic import lazy_modules
from phalanx.errors import ChildFailedError, RendezvousError, UsageError
from tests.conftest import HUNG

ELASTIC = "torch.distributed.elastic"
MODULES = {
    f"{ELASTIC}.{name}": f"phalanx.elastic.{name}"
    for name in (
        "agent",
        "agent.server",
        "agent.server.api",
        "agent.server.local_elastic_agent",
        "control_plane",
        "rendezvous",
        "rendezvous.api",
        "rendezvous.c10d_rendezvous_backend",
        "rendezvous.dynamic_rendezvous",
        "rendezvous.etcd_rendezvous",
        "rendezvous.etcd_server",
        "rendezvous.etcd_store",
        "rendezvous.registry",
        "rendezvous.static_tcp_rendezvous",
        "rendezvous.utils",
        "utils",
        "utils.api",
        "utils.data",
        "utils.data.cycling_iterator",
        "utils.data.elastic_distributed_sampler",
        "utils.distributed",
        "utils.log_level",
        "utils.logging",
        "utils.process_state",
        "utils.store",
    )
} | {
    "torch.distributed.launcher": "phalanx.launcher",
    "torch.distributed.launcher.api": "phalanx.launcher.api",
    "torch.distributed.run": "phalanx.run",
    "torch.distributed.launch": "phalanx.launch",
    "torch.distributed.argparse_util": "phalanx.argparse_util",
}

# (torch's module, name) → why it is not here.
ABSENT = {
    ("rendezvous.etcd_store", "cas_delay"): "a pause between polls of etcd's v2 API",
    ("rendezvous.etcd_server", "find_free_port"): "etcd is started by its own command",
    ("rendezvous.etcd_server", "stop_etcd"): "etcd is started by its own command",
    ("rendezvous.dynamic_rendezvous", "get_method_name"): "a helper for torch's own log lines",
    ("utils.data.elastic_distributed_sampler", "T"): "a type variable",
    ("multiprocessing.redirects", "libc"): "a library opened with ctypes",
}
# Differences in signatures that are meant: (module, qualified name) → why.
DIFFERENT = {
    ("launcher.api", "LaunchConfig"): "the default backend is our own; the rest is compared below",
    ("agent.server.api", "RunResult"): "one more field, at the end: what was stopped because of the failures",
    ("rendezvous.static_tcp_rendezvous", "StaticTCPRendezvous"): "timeout has a default",
    ("rendezvous.dynamic_rendezvous", "DynamicRendezvousHandler"): "is made by from_backend",
}


# Parameters that a supported version of torch does not have yet: (module, qualified name) → them.
NEWER = {
    ("rendezvous.dynamic_rendezvous", "RendezvousSettings"): ("cas_backoff_max_seconds",),
    ("rendezvous.dynamic_rendezvous", "DynamicRendezvousHandler.from_backend"): ("cas_backoff_max_seconds",),
}


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    return pytest.importorskip("torch.distributed.elastic")


def short(name: str) -> str:
    return name.removeprefix(ELASTIC + ".").removeprefix("torch.distributed.")


def offered(module: ModuleType) -> list[str]:
    """The public names that a module of torch's defines itself, or says are its interface."""
    if getattr(module, "__all__", None):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def call(value: Any) -> list[tuple[str, Any, Any]] | None:
    """Name, kind and default of every parameter; annotations are each library's own.

    `options` is ours, keyword-only and has a default: a call written for torch does not meet it.
    """
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    plain = (str, int, float, bool, tuple, type(None))
    return [
        (p.name, p.kind, p.default if isinstance(p.default, plain) else "…")
        for p in signature.parameters.values()
        if not (p.name == "options" and p.kind is p.KEYWORD_ONLY and p.default is not p.empty)
    ]


def same_call(key: tuple[str, str], mine: Any, yours: Any) -> bool:
    """Whether both are called in the same way; parameters that this torch does not have yet do not count."""
    expected, found = call(yours), call(mine)
    if found is not None and expected is not None:
        later = set(NEWER.get(key, ())) - {name for name, _, _ in expected}
        found = [parameter for parameter in found if parameter[0] not in later]
    return found == expected


@pytest.mark.parametrize("theirs", MODULES)
def test_every_public_name_is_there(torch: ModuleType, theirs: str) -> None:
    original = importlib.import_module(theirs)
    ours = importlib.import_module(MODULES[theirs])
    missing = [
        name for name in offered(original) if not hasattr(ours, name) and (short(theirs), name) not in ABSENT
    ]
    assert not missing


ETCD_V2 = ("rendezvous.etcd_rendezvous", "rendezvous.etcd_rendezvous_backend", "rendezvous.etcd_store")


SWAPPED = tuple(f"torch.distributed.{name}" for name in ("elastic", "launcher", "run", "argparse_util"))


def torchs_modules() -> list[str]:
    """All modules that Phalanx stands in for, as the installed torch has them."""
    packages = [importlib.import_module(name) for name in SWAPPED[:2]]
    below = [m.name for top in packages for m in pkgutil.walk_packages(top.__path__, top.__name__ + ".")]
    names = [*SWAPPED, "torch.distributed.launch", *below]
    return [name for name in names if short(name) not in ETCD_V2 and not short(name).endswith("._etcd_stub")]


def at_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those in `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for block in (node.body, node.orelse, *handlers, getattr(node, "finalbody", [])):
                yield from at_top(block)


def names_at_top(module: ModuleType) -> set[str]:
    """The public names that a module of torch's assigns, or imports from those that Phalanx stands in for."""
    names: set[str] = set()
    for node in at_top(ast.parse(Path(str(module.__file__)).read_text()).body):
        match node:
            case ast.ImportFrom():
                source = "." * node.level + (node.module or "")
                if importlib.util.resolve_name(source, str(module.__package__)).startswith(SWAPPED):
                    names.update(alias.asname or alias.name for alias in node.names)
            case ast.Import():
                names.update(a.asname for a in node.names if a.asname and a.name.startswith(SWAPPED))
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_") and hasattr(module, name)}


def test_what_torchs_modules_import_is_there_as_well(torch: ModuleType) -> None:
    missing = [
        (short(theirs), name)
        for theirs in torchs_modules()
        for name in names_at_top(importlib.import_module(theirs))
        if not hasattr(importlib.import_module(theirs.replace("torch.distributed", "phalanx")), name)
    ]
    assert sorted(set(missing) - set(ABSENT)) == []


@pytest.mark.parametrize("ours", lazy_modules._IMPORTED)
def test_every_name_of_the_table_can_be_imported(ours: str) -> None:
    module = importlib.import_module(f"phalanx.{ours}")
    for name in lazy_modules._paths(module.__name__):
        getattr(module, name)


def test_a_name_may_be_replaced_where_programs_replace_it_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.launcher.api import LaunchConfig, elastic_launch

    monkeypatch.setattr("phalanx.launcher.api.launch_agent", lambda *args: {0: args[2]})
    assert elastic_launch(LaunchConfig(1, 1, 1), "true")("a") == {0: ["a"]}
    seen: list[Any] = []
    monkeypatch.setattr("phalanx.run.elastic_launch", lambda config, entry: lambda *words: seen.append(words))
    run.run(run.parse_args(["--no-python", "/bin/true", "b"]))
    assert seen == [("b",)]


@pytest.mark.parametrize("theirs", MODULES)
def test_they_are_called_in_the_same_way(torch: ModuleType, theirs: str) -> None:
    original = importlib.import_module(theirs)
    ours = importlib.import_module(MODULES[theirs])
    different = {}
    for name in offered(original):
        key = (short(theirs), name)
        mine, yours = getattr(ours, name, None), getattr(original, name)
        if key in ABSENT or key in DIFFERENT or mine is None or is_enum_or_error(yours):
            continue
        if callable(yours) and not same_call(key, mine, yours):
            different[name] = (call(mine), call(yours))
    assert not different


def is_enum_or_error(value: Any) -> bool:
    """Whose signatures are Python's own, and differ between its versions."""
    return isinstance(value, type) and issubclass(value, (str, BaseException))


@pytest.mark.parametrize("theirs", MODULES)
def test_methods_are_called_in_the_same_way(torch: ModuleType, theirs: str) -> None:
    original = importlib.import_module(theirs)
    ours = importlib.import_module(MODULES[theirs])
    different = {}
    for name in offered(original):
        mine, yours = getattr(ours, name, None), getattr(original, name)
        if not isinstance(yours, type) or mine is None or "etcd" in theirs or not hasattr(mine, "__module__"):
            continue
        if mine.__module__ == "phalanx.elastic.rendezvous.etcd_v2":
            continue  # they cannot be made, so nobody calls their methods
        for method, function in vars(yours).items():
            if method.startswith("_") or not (inspect.isfunction(function) or isinstance(function, property)):
                continue
            there = getattr(mine, method, None)
            if there is None:
                different[f"{name}.{method}"] = "missing"
            elif inspect.isfunction(function) and not same_call(
                (short(theirs), f"{name}.{method}"), there, function
            ):
                different[f"{name}.{method}"] = f"{call(there)} != {call(function)}"
    assert not different


def test_the_list_of_exceptions_is_not_longer_than_it_needs_to_be(torch: ModuleType) -> None:
    for module, name in ABSENT:
        theirs = importlib.import_module(f"{ELASTIC}.{module}")
        assert hasattr(theirs, name), (module, name)
        assert not hasattr(importlib.import_module(f"phalanx.elastic.{module}"), name), (module, name)


def test_launch_config_has_torchs_fields_in_torchs_order(torch: ModuleType) -> None:
    from torch.distributed.launcher.api import LaunchConfig as Theirs

    from phalanx.launcher.api import LaunchConfig

    mine, theirs = call(LaunchConfig), call(Theirs)
    assert mine is not None
    assert theirs is not None
    names = [name for name, _, _ in theirs]
    assert [name for name, _, _ in mine][: len(names)] == names
    differing = {a[0] for a, b in zip(mine, theirs, strict=False) if a != b}
    assert differing <= {"rdzv_backend"}


PACKAGES = [
    "phalanx.launcher",
    "phalanx.elastic",
    *(m.name for m in pkgutil.walk_packages(elastic.__path__, "phalanx.elastic.") if m.ispkg),
]


@pytest.mark.parametrize("ours", PACKAGES)
def test_what_lies_below_a_package_can_be_written_without_importing_it(ours: str) -> None:
    """As in torch, where importing a package imports most of what is in it."""
    code = (
        "import importlib, pkgutil, sys\n"
        "package = importlib.import_module(sys.argv[1])\n"
        "for m in pkgutil.iter_modules(package.__path__): assert getattr(package, m.name).__name__ == \\\n"
        "    f'{sys.argv[1]}.{m.name}'\n"
        "assert not hasattr(package, 'nosuch')"
    )
    subprocess.run([sys.executable, "-c", code, ours], check=True, timeout=HUNG)


def test_torchs_module_run_has_the_launcher_at_hand() -> None:
    from phalanx import launcher
    from phalanx.elastic import multiprocessing, utils

    assert run.elastic_launch is launcher.elastic_launch
    assert run.LaunchConfig is launcher.LaunchConfig
    assert run.Std is multiprocessing.Std
    assert run.macros is utils.macros
    with pytest.raises(AttributeError, match="nosuch"):
        run.nosuch  # noqa: B018


def test_no_torch_is_imported_without_need() -> None:
    names = [name for name in MODULES.values() if not name.endswith("elastic_distributed_sampler")]
    code = f"import sys, importlib\nfor n in {names!r}: importlib.import_module(n)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HUNG)


def test_what_is_left_out_says_so_when_used() -> None:
    from phalanx.elastic.rendezvous import etcd_rendezvous, etcd_rendezvous_backend, etcd_store

    for use in (
        lambda: etcd_rendezvous_backend.create_backend(None),
        lambda: etcd_rendezvous.EtcdRendezvousHandler(None, None),
        lambda: etcd_store.EtcdStore(None, "p"),
    ):
        with pytest.raises(RendezvousError, match=r"is not supported: .*use rdzv_backend"):
            use()


# -- the small functions ----------------------------------------------------------------------------------


def test_macros_variables_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.elastic.utils import get_env_variable_or_raise, get_socket_with_port, macros
    from phalanx.elastic.utils.distributed import create_c10d_store, get_free_port

    assert macros.substitute(["a${local_rank}", 3, "${other}"], "1") == ["a1", 3, "${other}"]
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(ValueError, match="NOT_THERE"):
        get_env_variable_or_raise("NOT_THERE")
    monkeypatch.setenv("NOT_THERE", "")
    assert get_env_variable_or_raise("NOT_THERE") == ""
    with get_socket_with_port() as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):  # it holds the port, and does not listen
            socket.create_connection(("127.0.0.1", port), HUNG)
        for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            if family == socket.AF_INET or os.path.exists("/proc/net/if_inet6"):
                with socket.socket(family) as other:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    with pytest.raises(OSError, match="in use"):
                        other.bind((loopback, port))
    assert 0 < get_free_port() < 65536
    with create_c10d_store(True, "127.0.0.1", timeout=HUNG) as store:
        with create_c10d_store(
            False, "127.0.0.1", store.port, timeout=HUNG, wait_for_workers=False
        ) as client:
            client.set("a", "1")
        assert store.get("a") == b"1"
    with pytest.raises(ValueError, match="server_port"):
        create_c10d_store(False, "127.0.0.1")


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    from phalanx.elastic.utils.logging import get_log_level, get_logger

    monkeypatch.delenv("LOGLEVEL", raising=False)
    assert get_log_level() == "WARNING"
    monkeypatch.setenv("LOGLEVEL", "debug")
    assert get_logger().name == __name__
    assert get_logger("some.name").level == logging.DEBUG


def test_the_cycling_iterator() -> None:
    from phalanx.elastic.utils.data import CyclingIterator

    assert list(CyclingIterator(3, lambda epoch: iter([epoch] * epoch), start_epoch=1)) == [1, 2, 2]
    assert list(CyclingIterator(2, lambda epoch: iter([]))) == []


def test_the_sampler_gives_the_same_items_as_torchs(torch: ModuleType) -> None:
    from torch.distributed.elastic.utils.data import ElasticDistributedSampler as Theirs

    from phalanx.elastic.utils.data import ElasticDistributedSampler

    for replicas, start in ((1, 0), (2, 3), (3, 7), (4, 5)):
        for rank in range(replicas):
            mine = ElasticDistributedSampler(range(10), replicas, rank, start)
            theirs = Theirs(range(10), replicas, rank, start)  # type: ignore[arg-type]
            for epoch in (0, 5):
                mine.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert (len(mine), list(mine)) == (len(theirs), list(theirs))
    # Fewer items left than there are ranks, which torch's own cannot do: each rank still gets one.
    assert [list(ElasticDistributedSampler(range(10), 4, rank, 9)) for rank in range(4)] == [[9]] * 4
    with pytest.raises(ValueError, match="start_index=10"):
        ElasticDistributedSampler(range(10), 2, 0, 10)


# -- phalanx.run ------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    return path


def test_the_namespace_has_torchs_attributes(torch: ModuleType) -> None:
    import torch.distributed.run as theirs

    words = ["--nproc_per_node", "2", "--nnodes=1:2", "-m", "some.module", "--its", "own"]
    mine, yours = vars(run.parse_args(words)), vars(theirs.parse_args(words))
    different = {name: (mine.get(name), value) for name, value in yours.items() if mine.get(name) != value}
    assert not different


def test_a_configuration_from_a_namespace(script: Path) -> None:
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--master-port", "5", "--role", "r"]
    config, entrypoint, rest = run.config_from_args(run.parse_args([*words, str(script), "--a", "1"]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 1)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.role) == ("static", "h:5", "r")
    assert config.rdzv_configs["rank"] == 1
    assert entrypoint == sys.executable
    assert rest == [str(script), "--a", "1"]
    with pytest.raises(UsageError, match="no such script"):
        run.config_from_args(run.parse_args(["no_such_script.py"]))


def test_the_small_functions_of_run(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.parse_min_max_nnodes("3") == (3, 3)
    assert run.parse_min_max_nnodes("1:4") == (1, 4)
    with pytest.raises(RuntimeError, match="1:2:3"):
        run.parse_min_max_nnodes("1:2:3")
    assert run.determine_local_world_size("3") == 3
    assert run.determine_local_world_size("cpu") in {len(os.sched_getaffinity(0)), os.cpu_count()}
    for bad in ("many", "0"):
        with pytest.raises(ValueError, match=f"nproc_per_node={bad}"):
            run.determine_local_world_size(bad)
    args = run.parse_args([str(script)])
    assert run.get_use_env(args)
    assert run.get_rdzv_endpoint(args) == "127.0.0.1:29500"
    before = sys.argv
    try:
        with pytest.raises(SystemExit) as stop:
            run.run_script_path(str(script), "4")
    finally:
        sys.argv = before
    assert stop.value.code == 4


def test_run_and_main_raise(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for call in (lambda *words: run.run(run.parse_args(words)), lambda *words: run.main(words)):
        call(str(script), "0")
        with pytest.raises(ChildFailedError) as failed:
            call(str(script), "5")
        assert failed.value.get_first_failure()[1].exitcode == 5
        with pytest.raises(ValueError, match="4:2"):
            call("--nnodes", "4:2", str(script))
        with pytest.raises(ValueError, match="no such script"):
            call("no_such_script.py")
    with pytest.raises(ValueError, match="--no-such-flag"):
        run.main(["--no-such-flag", str(script)])
    assert "FAILED" not in capsys.readouterr().err, "the exception has the report"
    with pytest.raises(SystemExit) as stop:
        run.main(["--help"])
    assert stop.value.code == 0
    assert "--nproc-per-node" in capsys.readouterr().out


def test_main_reads_the_command_line(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", str(script), "6"])
    with pytest.raises(ChildFailedError) as failed:
        run.main()
    assert failed.value.get_first_failure()[1].exitcode == 6


def test_python_m_phalanx_run(script: Path) -> None:
    for code in (0, 6):
        command = [sys.executable, "-m", "phalanx.run", "--nproc_per_node=1", str(script), str(code)]
        done = subprocess.run(command, capture_output=True, timeout=HUNG, check=False)
        assert done.returncode == code
        assert (b"FAILED" in done.stderr) == bool(code)
    command = [sys.executable, "-m", "phalanx.run", "no_such_script.py"]
    done = subprocess.run(command, capture_output=True, timeout=HUNG, check=False)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_phalanx_torchrun(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.cli.torchrun import torchrun_main

    monkeypatch.setattr(sys, "argv", ["phalanx-torchrun", "--standalone", str(script), "3"])
    assert torchrun_main() == 3


# -- phalanx.launch and phalanx.argparse_util -------------------------------------------------------------


@pytest.fixture
def show(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text("import os, sys\nprint(os.environ['LOCAL_RANK'], *sys.argv[1:], flush=True)\n")
    return path


@pytest.mark.parametrize("flag", ["", "--use-env", "--use_env"])
def test_python_m_phalanx_launch_passes_the_local_rank(show: Path, flag: str) -> None:
    command = [sys.executable, "-m", "phalanx.launch", "--nproc-per-node=2", *flag.split(), str(show), "--lr"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG, check=True)
    lines = {"0 --lr", "1 --lr"} if flag else {"0 --local-rank=0 --lr", "1 --local-rank=1 --lr"}
    assert {line.partition("]:")[2] or line for line in done.stdout.splitlines()} == lines
    assert "FutureWarning: phalanx.launch is deprecated" in done.stderr


def test_launch_fails_as_run_does(script: Path) -> None:
    from phalanx import launch

    words = ["--use-env", str(script), "5"]
    with pytest.raises(ChildFailedError) as failed:
        launch.launch(launch.parse_args(words))
    assert failed.value.get_first_failure()[1].exitcode == 5
    with pytest.warns(FutureWarning, match="phalanx run"), pytest.raises(ChildFailedError) as failed:
        launch.main(words)
    assert failed.value.get_first_failure()[1].exitcode == 5
    program = ["--no-python", "true"]
    with pytest.raises(ValueError, match="--use-env"):
        launch.launch(launch.parse_args(program))
    with pytest.warns(FutureWarning, match="phalanx run"), pytest.raises(ValueError, match="--use-env"):
        launch.main(program)
    for options, code in ((words, 5), (program, 2)):
        command = [sys.executable, "-m", "phalanx.launch", *options]
        done = subprocess.run(command, capture_output=True, timeout=HUNG, check=False)
        assert done.returncode == code
        assert b"Traceback" not in done.stderr


VARIABLES: list[dict[str, str]] = [
    {},
    {"PET_FOO": "from variable", "PET_BAR": "1"},
    {"PET_FOO": "", "PET_BAR": "0"},
]


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
@pytest.mark.parametrize("words", [[], ["-f", "given"], ["--foo", "given", "--bar"]], ids=" ".join)
@pytest.mark.parametrize("default", [None, "default"])
@pytest.mark.parametrize("required", [False, True])
def test_the_actions_of_argparse_util(
    torch: ModuleType,
    variables: dict[str, str],
    words: list[str],
    default: str | None,
    required: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import argparse

    from torch.distributed import argparse_util as theirs

    from phalanx import argparse_util as ours

    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def parsed(module: Any) -> Any:
        parser = argparse.ArgumentParser()
        parser.add_argument("-f", "--foo", action=module.env, default=default, required=required)
        parser.add_argument("--bar", action=module.check_env)
        try:
            return parser.parse_args(words)
        except SystemExit as stop:
            return stop.code

    assert parsed(ours) == parsed(theirs)


def test_a_flag_variable_that_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from phalanx.argparse_util import check_env

    monkeypatch.setenv("PET_BAR", "maybe")
    with pytest.raises(ValueError, match="PET_BAR=maybe"):
        argparse.ArgumentParser().add_argument("--bar", action=check_env)


STATES = ("D", "DN", "D+", "S", "d", "", None)


def test_states_of_processes_are_taken_and_returned_as_torchs_are(torch: ModuleType) -> None:
    from torch.distributed.elastic.utils import process_state as theirs

    from phalanx.elastic.utils import process_state as ours

    for state in STATES:
        assert ours.is_uninterruptible_state(state) == theirs.is_uninterruptible_state(state), state
    for pid in (os.getppid(), str(os.getppid()), 0, -1, 1 << 30, "x", None, True):
        assert (ours.read_proc_state(pid) is None) == (theirs.read_proc_state(pid) is None), pid  # type: ignore[arg-type]
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ours.read_proc_state(child.pid) == theirs.read_proc_state(child.pid) == "Z"
    child.wait()


def test_destinations_of_logs_are_made_and_printed_as_torchs_are(torch: ModuleType) -> None:
    import dataclasses

    from torch.distributed.elastic.multiprocessing import LogsDest as Theirs

    from phalanx.elastic.multiprocessing import LogsDest

    for made in ((), ({0: "a"}, {}, {0: "b"}, {}, {0: "c"}, "d", "e")):
        ours, theirs = LogsDest(*made), Theirs(*made)
        assert repr(ours) == repr(theirs)
        assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
        ours.stdouts[7] = "f"
        assert dataclasses.replace(ours, stderrs={1: "g"}).stdouts[7] == "f"
    assert LogsDest().stdouts == {}


def test_prefix_and_signals_reach_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.run import config_from_args, parse_args

    def made(*argv: str) -> Any:
        return config_from_args(parse_args([*argv, "--no-python", "/bin/true"]))[0]

    monkeypatch.delenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", raising=False)
    plain = made()
    assert plain.log_line_prefix_template is None
    assert plain.signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}]:")
    assert made().log_line_prefix_template == "[${rank}]:"
    chosen = made("--log-line-prefix-template", "<${rank}>", "--signals-to-handle", "SIGTERM,SIGUSR1")
    assert (chosen.log_line_prefix_template, chosen.signals_to_handle) == ("<${rank}>", "SIGTERM,SIGUSR1")
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGUSR2")
    assert made().signals_to_handle == "SIGUSR2"
