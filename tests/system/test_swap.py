"""`phalanx.swap`: programs that import torch's elastic modules get Phalanx's, in child processes too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HUNG
from tests.support.run_helpers import Ended, ended, plain_environment, script

SWAP = [sys.executable, "-m", "phalanx.swap"]


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def swapped(*words: str, env: dict[str, str] | None = None) -> Ended:
    return ended([*SWAP, *words], plain_environment(**(env or {})))


def swapped_framework(*words: str) -> Ended:
    """With torch and what is built on it: their imports take their time on a busy machine."""
    beside = os.path.dirname(sys.executable)
    env = plain_environment(OMP_NUM_THREADS="1", PATH=f"{beside}:{os.environ['PATH']}")
    command = [*SWAP, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=4 * HUNG, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


# Stands for torch where it is not installed: a package whose elastic modules must not be imported.
FAKE = {
    "torch/__init__.py": "",
    "torch/distributed/__init__.py": "",
    "torch/distributed/elastic/__init__.py": "raise ImportError('torch was asked')",
    "torch/distributed/run.py": "raise ImportError('torch was asked')",
}
PROGRAM = """
import subprocess, sys
import torch.distributed.run
import torch.distributed.elastic.multiprocessing.errors as errors
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.elastic.agent.server import SimpleElasticAgent
names = torch.distributed.run.__name__, errors.record.__module__, LaunchConfig.__module__
print(*names, *sys.argv[1:], flush=True)
assert torch.distributed.elastic.multiprocessing.errors is errors
if sys.argv[1:] != ["child"]:
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""
EXPECTED = "phalanx.run phalanx.worker.recorder phalanx.elastic.agent.elastic_launch"


@pytest.fixture
def fake_torch(tmp_path: Path) -> dict[str, str]:
    for name, text in FAKE.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.CUSTOMIZED = True")
    return {"PYTHONPATH": str(tmp_path / "site")}


def test_a_script_and_its_children(tmp_path: Path, fake_torch: dict[str, str]) -> None:
    done = swapped(script(tmp_path, PROGRAM), "a", "b", env=fake_torch)
    assert done.code == 0, done
    assert done.out.splitlines() == [f"{EXPECTED} a b", f"{EXPECTED} child"], done


def test_without_the_swap_it_is_torch(tmp_path: Path, fake_torch: dict[str, str]) -> None:
    done = ended([sys.executable, script(tmp_path, PROGRAM)], plain_environment(**fake_torch))
    assert "torch was asked" in done.err, done


def test_a_module_and_a_command(tmp_path: Path, fake_torch: dict[str, str]) -> None:
    path = Path(script(tmp_path / "site", PROGRAM, "program.py"))
    assert swapped("-m", "program", "child", env=fake_torch).out == f"{EXPECTED} child\n"
    path.write_text(f"#!{sys.executable}\n{PROGRAM}")
    path = path.rename(path.with_suffix(""))
    path.chmod(0o755)
    done = swapped("program", "child", env={**fake_torch, "PATH": f"{path.parent}:{os.environ['PATH']}"})
    assert done.out == f"{EXPECTED} child\n", done


def test_a_sitecustomize_of_the_users_still_runs(tmp_path: Path, fake_torch: dict[str, str]) -> None:
    done = swapped(script(tmp_path, "print(CUSTOMIZED)"), env=fake_torch)
    assert done.out == "True\n", done


def test_bad_usage() -> None:
    done = swapped("no_such_program_here")
    assert (done.code, len(done.err.splitlines())) == (2, 1), done
    assert "no_such_program_here" in done.err
    assert swapped().code == 2
    assert swapped("no_such.py").code == 2
    assert swapped("--help").out.startswith("usage: python -m phalanx.swap")


INSTALL = """
import os, subprocess, sys
import phalanx.swap
phalanx.swap.install()
phalanx.swap.install()
import torch.distributed.run
print(torch.distributed.run.__name__, flush=True)
child = [sys.executable, "-c", "import torch.distributed.run as run; print(run.__name__)"]
subprocess.run(child, check=True)
phalanx.swap.remove()
assert subprocess.run(child, capture_output=True).returncode == 1, "the child asked torch"
try:
    import torch.distributed.run
except ImportError as error:
    print(error)
print(os.environ["PYTHONPATH"] == sys.argv[1])
"""


def test_install_and_remove(tmp_path: Path, fake_torch: dict[str, str]) -> None:
    program = script(tmp_path, INSTALL)
    done = ended([sys.executable, program, fake_torch["PYTHONPATH"]], plain_environment(**fake_torch))
    assert done.out.splitlines() == ["phalanx.run", "phalanx.run", "torch was asked", "True"], done


WORKER = """
import os, sys
assert "PHALANX_WORKER" in os.environ, "started by another launcher"
assert any(type(finder).__name__ == "SwapFinder" for finder in sys.meta_path), "not swapped"
print("worker", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], *sys.argv[1:], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and sys.argv[1:] == ["again"]:
    sys.exit(3)
"""


def lines(done: Ended) -> list[str]:
    found = (line.partition("worker ")[2] for line in done.out.splitlines() if "worker " in line)
    return sorted(found)


def test_workers_of_the_swapped_launcher_are_swapped(tmp_path: Path, fake_torch: dict[str, str]) -> None:
    """Forked by warm helpers, and started anew (--warm off)."""
    for warm in ("auto", "off"):
        words = ["--warm", warm, "--nproc-per-node", "2", script(tmp_path, WORKER)]
        done = swapped("-m", "phalanx.run", *words, env=fake_torch)
        assert (done.code, lines(done)) == (0, ["0 0", "1 0"]), done


@needs("torch")
@pytest.mark.timeout(5 * HUNG)
def test_torchrun_itself(tmp_path: Path) -> None:
    words = ["--nproc_per_node=2", "--max-restarts", "1", script(tmp_path, WORKER), "again"]
    done = swapped_framework("torchrun", *words)
    assert done.code == 0, done
    assert {"0 1 again", "1 1 again"} <= set(lines(done)), done
    assert "1 restart" in done.err


@needs("torch", "accelerate")
@pytest.mark.timeout(5 * HUNG)
def test_accelerate_launch(tmp_path: Path) -> None:
    words = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    words += ["--dynamo_backend", "no", "--max_restarts", "1", script(tmp_path, WORKER), "again"]
    done = swapped_framework("accelerate", "launch", *words)
    assert done.code == 0, done
    assert {"0 1 again", "1 1 again"} <= set(lines(done)), done


@needs("torch", "lightning")
@pytest.mark.long  # its imports take as long as all other tests here
@pytest.mark.timeout(5 * HUNG)
def test_the_cli_of_fabric(tmp_path: Path) -> None:
    words = ["--accelerator", "cpu", "--devices", "2", "--strategy", "ddp", script(tmp_path, WORKER)]
    done = swapped_framework("fabric", "run", *words)
    assert (done.code, lines(done)) == (0, ["0 0", "1 0"]), done


CHECKPOINT = """
import os, sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.elastic.agent.server.api import _get_fq_hostname

if __name__ == "__main__":
    assert _get_fq_hostname.__module__.startswith("phalanx.")
    dist.init_process_group("gloo")
    state = {"weight": torch.full((4,), float(dist.get_rank()))}
    kinds = dict(async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    dcp.async_save(state, checkpoint_id=sys.argv[1], **kinds).result()
    loaded = {"weight": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id=sys.argv[1])
    print("worker", dist.get_rank(), loaded["weight"].tolist(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


@needs("torch", "numpy")
@pytest.mark.long
def test_torchs_own_checkpoints_in_a_process_of_their_own(tmp_path: Path) -> None:
    words = ["--nproc-per-node", "1", script(tmp_path, CHECKPOINT), str(tmp_path / "kept")]
    done = swapped_framework("-m", "torch.distributed.run", *words)
    assert (done.code, lines(done)) == (0, ["0 [0.0, 0.0, 0.0, 0.0]"]), done


@needs("torch", "torchx")
@pytest.mark.long
@pytest.mark.timeout(5 * HUNG)
def test_torchx(tmp_path: Path) -> None:
    """It starts `torchrun` by name, passes --role, and reads the launcher's error file."""
    words = ["run", "--scheduler", "local_cwd", "dist.ddp", "-j", "1x2", "--script"]
    done = swapped_framework("torchx", *words, script(tmp_path, WORKER))
    assert done.code == 0, done
    assert sum("worker 0 0" in line for line in (done.out + done.err).splitlines()) == 1, done
    failing = script(tmp_path, "raise ValueError('bad batch')", "failing.py")
    done = swapped_framework("torchx", *words, failing)
    assert "ValueError: bad batch" in done.out + done.err, done


TORCHTNT = """
import os
import torch.distributed.launcher as launcher
from torchtnt.utils.test_utils import get_pet_launch_config

def rank():
    return int(os.environ["RANK"])

if __name__ == "__main__":
    assert launcher.__name__ == "phalanx.launcher"
    print("worker", launcher.elastic_launch(get_pet_launch_config(2), entrypoint=rank)())
"""


@needs("torch", "torchtnt")
@pytest.mark.long
@pytest.mark.timeout(5 * HUNG)
def test_torchtnt(tmp_path: Path) -> None:
    done = swapped_framework(script(tmp_path, TORCHTNT))
    assert (done.code, lines(done)) == (0, ["{0: 0, 1: 1}"]), done
