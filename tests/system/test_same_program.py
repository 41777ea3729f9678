"""A program that drives the launcher from Python, under torch and with the import changed: same results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HUNG
from tests.support.run_helpers import plain_environment

# ROOT is torch.distributed or phalanx; nothing else differs.
PROGRAM = r"""
import json, os, sys
import ROOT.run as run
from ROOT.elastic.multiprocessing.errors import ChildFailedError
from ROOT.launcher.api import LaunchConfig, elastic_launch, launch_agent

folder = sys.argv[1]
told = {}

def config(restarts=0, workers=2):
    return LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=workers, run_id="job", role="trainer", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=restarts, monitor_interval=0.05, start_method="fork",
    )

def function(word, number):
    return f"{word} {number} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, {os.environ['ROLE_NAME']}"

def failing(word):
    if os.environ["RANK"] == "1":
        raise ValueError(word)
    import signal
    signal.pause()

def outcome(call):
    try:
        return call()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        data = failure.error_file_data["message"]
        text = data["message"] if isinstance(data, dict) else data
        return ["ChildFailedError", error.name, rank, failure.local_rank, failure.exitcode, text]
    except Exception as error:
        return ["raises", [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"][0]]

def once(name):
    # Appends its attempt to a file; fails in the first.
    return (
        "import os, sys\n"
        f"with open({folder + '/' + name!r}, 'a') as file:\n"
        "    names = 'RANK', 'TORCHELASTIC_RESTART_COUNT', 'TORCHELASTIC_MAX_RESTARTS'\n"
        "    file.write(':'.join(os.environ[name] for name in names) + ' ')\n"
        "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )

def attempts(name):
    return sorted(open(f"{folder}/{name}").read().split())

def script(name, text):
    with open(f"{folder}/{name}.py", "w") as file:
        file.write(text)
    return f"{folder}/{name}.py"

told["function"] = outcome(lambda: launch_agent(config(), function, ["word", 7]))
told["called"] = outcome(lambda: elastic_launch(config(), function)("word", 7))
told["function fails"] = outcome(lambda: launch_agent(config(), failing, ["bad"]))
told["program"] = outcome(lambda: launch_agent(config(), sys.executable, ["-c", "pass"]))
exits = ["-c", "import os; os._exit(9)"]
told["program fails"] = outcome(lambda: launch_agent(config(workers=1), sys.executable, exits))
told["restarted"] = outcome(lambda: launch_agent(config(1, 1), sys.executable, ["-c", once("a")]))
told["restarted: attempts"] = attempts("a")
told["no restart"] = outcome(lambda: launch_agent(config(0, 1), sys.executable, ["-c", once("b")]))[3:5]
told["no restart: attempts"] = attempts("b")

told["main"] = outcome(lambda: run.main([script("good", "pass")]))
told["main fails"] = outcome(lambda: run.main([script("bad", "import os; os._exit(5)")]))[2:5]
told["main killed"] = outcome(lambda: run.main([script("dies", "import os; os.kill(os.getpid(), 9)")]))[2:5]
told["main restarts"] = outcome(lambda: run.main(["--max-restarts", "2", script("c", once("c"))]))
told["main restarts: attempts"] = attempts("c")
told["main words"] = outcome(lambda: run.main(["--nproc-per-node", "many", script("good", "pass")]))
told["run"] = outcome(lambda: run.run(run.parse_args(["--role", "", script("good", "pass")])))
told["run fails"] = outcome(lambda: run.run(run.parse_args([script("bad", "import os; os._exit(5)")])))[2:5]
print("TOLD", json.dumps(told, sort_keys=True))
"""


def results(root: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("ROOT", root))
    done = subprocess.run(
        [sys.executable, program, folder],
        env=plain_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=5 * HUNG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    told: dict[str, Any] = json.loads(line.removeprefix("TOLD "))
    return told


@pytest.mark.timeout(12 * HUNG)  # torch starts a group of workers in seconds
def test_a_program_that_drives_the_launcher(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.run")
    ours, theirs = results("phalanx", tmp_path / "ours"), results("torch.distributed", tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    different = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert not different
