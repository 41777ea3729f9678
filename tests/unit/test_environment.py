"""The environment is read in one module; other uses of `os.environ` are listed here, with their reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import phalanx
from phalanx.job import environment

ROOT = Path(phalanx.__file__).parent

ALLOWED = {
    "job/environment.py": "the only reader of settings",
    # Handed to a child process, or to a function that looks programs up for one.
    "agent/workers/local_workers.py": "the environment of workers",
    "agent/warm/helper_pool.py": "the environment of helpers is part of what was learned",
    "job/program.py": "PATH and PYTHON* variables, as the worker will see them",
    "agent/workers/subprocess_handle.py": "the environment of a worker",
    "agent/workers/worker_group.py": "the environment of workers",
    "agent/workers/worker_kinds.py": "PATH, as the worker will see it",
    "agent/warm/spawner.py": "the environment of helpers",
    # Runs in a helper or in a worker, whose own environment it is.
    "worker/jax.py": "the worker's own",
    "worker/torch_collectives.py": "the worker's own",
    "elastic/utils/functions.py": "a function of torch's that reads any variable",
    "worker/reentry/reenter.py": "the worker's own",
    "worker/reentry/takeover.py": "the worker's own, set anew for every round",
    "worker/reentry/worker_round.py": "the worker's own",
    "worker/state/agreement.py": "the worker's own",
    "helpers/preload/preload.py": "preloaded modules see the worker's environment",
    "helpers/script_standby.py": "a standby's own, which becomes a worker's",
    "helpers/standby.py": "a standby's own, which becomes a worker's",
    "worker/api.py": "the worker's own",
    "worker/recorder.py": "the worker's own",
    "worker/bootstrap.py": "the worker's own",
    "helpers/fork_setup.py": "the worker's own",
    "helpers/zygote.py": "the worker's own, installed after the fork",
}


def uses_environment(path: Path) -> bool:
    names = {"environ", "environb", "getenv", "getenvb"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {n.name for n in node.names}:
            return True
    return False


def test_only_listed_modules_use_the_environment() -> None:
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if uses_environment(path)}
    assert found - ALLOWED.keys() == set(), "get the value as an argument, or from phalanx.job.environment"
    # An entry goes when its module no longer needs it.
    assert {name for name in ALLOWED if (ROOT / name).exists()} - found == set()


def test_default_ports_are_written_in_one_place() -> None:
    ports = {environment.STATIC_PORT, environment.STORE_PORT, environment.ETCD_PORT}
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in ports and type(node.value) is int
    }
    assert found == {"job/environment.py"}


def test_values_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        environment.SIGNALS,
        environment.UNINTERRUPTIBLE_TIMEOUT,
        environment.ENABLE_FILE_TIMER,
        environment.TIMER_FILE,
        environment.OWN_WORKER_STORE,
        environment.LOG_LEVEL,
        "NO_COLOR",
        "TERM",
        *environment.NODE_INDEXES,
    ):
        monkeypatch.delenv(name, raising=False)
    assert environment.signals() == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert environment.uninterruptible_timeout() == 0
    assert environment.timer_file() is None
    assert environment.shares_store()
    assert environment.node_index() == -1
    assert environment.log_level() == "WARNING"
    assert environment.allows_colour()
    assert not environment.rewrites_lines()
    monkeypatch.setenv(environment.UNINTERRUPTIBLE_TIMEOUT, "2.5")
    monkeypatch.setenv(environment.ENABLE_FILE_TIMER, "1")
    monkeypatch.setenv(environment.OWN_WORKER_STORE, "1")
    monkeypatch.setenv("SLURM_NODEID", "x")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    monkeypatch.setenv("TERM", "dumb")
    assert environment.uninterruptible_timeout() == 2.5
    assert environment.timer_file() == ""
    assert not environment.shares_store()
    assert environment.node_index() == 3
    assert not environment.allows_colour()
    monkeypatch.setenv(environment.UNINTERRUPTIBLE_TIMEOUT, "soon")
    with pytest.raises(ValueError, match=f"{environment.UNINTERRUPTIBLE_TIMEOUT}=soon"):
        environment.uninterruptible_timeout()


def test_the_first_usable_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setenv("TEMP", str(tmp_path))
    assert environment.temporary_directory() == str(tmp_path)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "5"}),
        # On AMD, this one overrides the other.
        (
            {"HIP_VISIBLE_DEVICES": "2, 3", "CUDA_VISIBLE_DEVICES": "0"},
            {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"},
        ),
    ],
)
def test_a_virtual_local_rank_has_one_device(environ: dict[str, str], expected: dict[str, str]) -> None:
    from phalanx.agent.workers.environment import virtual_device

    assert virtual_device(1, environ) == {"LOCAL_RANK": "0", **expected}


def test_a_virtual_local_rank_without_a_device_is_named() -> None:
    from phalanx.agent.workers.environment import virtual_device

    with pytest.raises(ValueError, match="local rank 2 has no device; HIP_VISIBLE_DEVICES=0,1 names only 2"):
        virtual_device(2, {"HIP_VISIBLE_DEVICES": "0,1"})
