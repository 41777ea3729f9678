"""The goodput ledger of real jobs that are killed, against the truth that the workers write down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_helpers import run, script

KILLED = """
import json, os, random, signal, sys, time
from phalanx import worker

folder, kills, length, tells = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "ready"
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
saved, log = f"{folder}/saved-{rank}", os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
tell = lambda *what: os.write(log, json.dumps(what).encode() + b"\\n")
source = random.Random(attempt)
first = int(open(saved).read()) if os.path.exists(saved) else 0
last = first + source.randrange(25, 40)
dies = rank == "0" and attempt < kills
if tells:
    worker.ready()
tell("begin", time.monotonic())
for step in range(first + 1, last + 1):
    time.sleep(length * source.uniform(0.7, 1.3))
    if step == last and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    tell("step", time.monotonic(), step)
    worker.heartbeat(step)
    if step % 10 == 0:
        with worker.section("checkpoint"):
            time.sleep(length)
            with open(saved + ".new", "w") as file:
                file.write(str(step))
            os.replace(saved + ".new", saved)
        tell("saved", time.monotonic())
if attempt < kills:
    time.sleep(1000)
os._exit(0)
"""


def truth(log: Path) -> tuple[float, int]:
    """The seconds of a rank that were not in vain: each step once; and its starts."""
    productive, reached, before, starts = 0.0, 0, 0.0, 0
    for line in log.read_text().splitlines():
        what, at, *step = json.loads(line)
        starts += what == "begin"
        if what == "step" and step[0] > reached:
            productive += at - before
            reached = step[0]
        before = at
    return productive, starts


def killed_job(tmp_path: Path, kills: int, length: float, tells: str) -> dict[str, Any]:
    words = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        str(kills),
        "--backoff",
        "0",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    ended = run(*words, script(tmp_path, KILLED), str(tmp_path), str(kills), str(length), tells)
    assert ended.code == 0, ended
    (summary,) = (tmp_path / "logs").glob("*/summary.json")
    found: dict[str, Any] = json.loads(summary.read_text())
    return {**found, "said": ended.said}


@pytest.mark.parametrize(
    ("kills", "length", "tells"),
    [
        (3, 0.03, "ready"),
        pytest.param(50, 0.05, "ready", marks=pytest.mark.long),
        pytest.param(50, 0.05, "heartbeat", marks=pytest.mark.long),
    ],
)
def test_the_goodput_of_a_killed_job_is_the_truth(
    tmp_path: Path, kills: int, length: float, tells: str
) -> None:
    found = killed_job(tmp_path, kills, length, tells)
    goodput = found["goodput"]
    productive = 0.0
    for rank in (0, 1):
        seconds, starts = truth(tmp_path / f"log-{rank}")
        productive += seconds
        assert starts == kills + 1
    total = sum(goodput["seconds"].values())
    assert abs(goodput["goodput"] - productive / total) < 0.005, (found, productive)
    assert goodput["seconds"]["recomputed"] > 0.0
    assert goodput["seconds"]["checkpointing"] > 0.0
    wall = found["until"] - found["since"]
    assert total / 2 <= wall
    assert total / 2 > wall - 2.0, "no time is left out but that of the launcher itself"
    assert [one["recovery"] for one in found["incidents"]] == ["restart"] * kills
    assert all(one["over"] and one["first_step"] is not None for one in found["incidents"])
    assert found["incidents"][0]["rank"] == 0
    assert found["line"].startswith(f"goodput {100 * goodput['goodput']:.1f} %: ")
    assert f"{kills} restarts" in found["line"]
