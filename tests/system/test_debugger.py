"""Under a debugger that follows child processes, workers stop at breakpoints; the helpers stay out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import HUNG
from tests.support.dap_client import Debugged
from tests.support.run_helpers import script

pytest.importorskip("debugpy")
pytestmark = pytest.mark.timeout(5 * HUNG)  # every process imports the debugger, one after the other

WORKER = """
import os
def step():
    rank = os.environ["RANK"]
    print("worker", rank)
step()
"""
PROGRAM = """
import os, sys
from phalanx.launcher.api import LaunchConfig, elastic_launch

def step():
    rank = os.environ["RANK"]
    return rank

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, run_id="job", start_method=sys.argv[1], max_restarts=0)
    results = elastic_launch(config, step)()
    assert results == {0: "0", 1: "1"}, results
"""


def line_of(text: str, what: str) -> int:
    return 1 + next(i for i, line in enumerate(text.splitlines()) if what in line)


@pytest.mark.parametrize("warm", ["auto", "off"])
def test_the_workers_of_python_m_phalanx_run(tmp_path: Path, warm: str) -> None:
    path = script(tmp_path, WORKER)
    words = ["--warm", warm, "--nproc-per-node", "2", path]
    with Debugged(path, line_of(WORKER, "print("), "rank", module="phalanx.run", args=words) as job:
        job.end()
    assert job.exit_code == 0, job.notes
    assert sorted(job.stops) == ["'0'", "'1'"], job.notes
    assert "Traceback" not in "".join(job.notes)


def test_functions_of_a_debugged_program(tmp_path: Path) -> None:
    path = script(tmp_path, PROGRAM)
    with Debugged(path, line_of(PROGRAM, "return rank"), "rank", program=path, args=["spawn"]) as job:
        job.end()
    assert job.exit_code == 0, job.notes
    assert sorted(job.stops) == ["'0'", "'1'"], job.notes


def test_without_breakpoints_in_workers_a_failure_is_reported_as_ever(tmp_path: Path) -> None:
    path = script(tmp_path, "raise ValueError('bad batch')")
    with Debugged(path, 1000, "0", module="phalanx.run", args=[path]) as job:
        job.end()
    assert job.exit_code == 1, job.notes
    assert "Root cause: rank 0" in "".join(job.notes)
    assert "ValueError: bad batch" in "".join(job.notes)
