"""`phalanx check` as a person runs it: what it prints and returns, alone and with other nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli import check
from phalanx.cli import main as phalanx
from phalanx.core.exit_codes import UNFIT_NODE
from phalanx.core.fitness import EXIT_CODES, FIT, UNFIT, UNKNOWN, WARN, CheckFinding, judge_node
from tests.support.netns import Job, tell
from tests.support.run_helpers import PHALANX, ended, plain_environment, script

CHECK = [PHALANX[0], "check"]


def with_open_files(count: int) -> list[str]:
    """Words before a command that may have so many open files: below 256 is unfit, below 4096 a warning."""
    return ["sh", "-c", f'ulimit -n {count}; exec "$@"', "sh"]


def test_this_machine_as_a_table_and_as_json(tmp_path: Path) -> None:
    words = ["--only", "disk,shm,limits", "--disk", str(tmp_path)]
    done = ended([*CHECK, "--json", *words], plain_environment())
    told = json.loads(done.out)
    assert done.code == EXIT_CODES[told["fitness"]], done
    assert f"disk {tmp_path}" in [row["check"] for row in told["checks"]]
    assert {row["check"].partition(" /")[0] for row in told["checks"]} >= {"logs", "disk", "shared memory"}
    shown = ended([*CHECK, *words], plain_environment())
    lines = shown.out.splitlines()
    assert lines[0].split() == ["check", "value", "verdict", "what", "to", "do"]
    assert lines[-1].startswith(f"{told['node']}: ")
    assert list(tmp_path.iterdir()) == []


def test_an_unfit_machine(tmp_path: Path) -> None:
    done = ended([*CHECK, "--only=disk", "--log-dir", "/proc/logs"], plain_environment())
    assert done.code == 20, done
    assert done.out.splitlines()[-1].partition(": ")[2].startswith("unfit (logs /proc: "), done
    assert done.err == ""


def test_a_node_is_checked_before_it_joins_and_only_then(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    words = [*PHALANX, "--check", "--log-dir", str(tmp_path / "logs"), "--max-restarts", "1", path]
    done = ended([*with_open_files(2000), *words], plain_environment())
    assert done.code == 0, done
    (line,) = [line for line in done.said if line.startswith("check of ")]
    assert ": warn (" in line
    assert "open files: 2000" in line
    assert done.out == ""


def test_an_unfit_node_stays_out_and_the_others_run(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2") as job:
        good = job.node("good", "--check")
        good.up(1)
        bad = job.node("bad", "--check", before=with_open_files(200))
        gone = bad.end()
        assert gone.code == UNFIT_NODE, gone
        (line,) = [line for line in gone.said if "unfit" in line]
        assert "is unfit (open files: 200) and stays out of the job; phalanx check shows more" in line
        worker = good.latest()
        assert worker is not None
        assert worker.world == 1
        tell([worker])
        assert good.end().code == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["script.py"], "script.py: check takes options only"),
        (["--only", "gpu"], "--only gpu: no such check; there are gpus, "),
        (["--only"], "--only: needs a value"),
        (["--disk", "/no/such/place"], "--disk /no/such/place: not a directory"),
        (["--max-restarts", "2"], "--max-restarts: check does not use it"),
        (["--nonsense"], "no such option"),
    ],
)
def test_bad_usage(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(["check", *argv]) == 2
    assert words in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(["help", "check"]) == 0
    assert "0 fit, 10 warn, 20 unfit, 30 could not tell" in capsys.readouterr().out


def test_the_table_is_aligned_and_ends_with_the_verdict() -> None:
    found = [
        CheckFinding("memory", "plenty"),
        CheckFinding("disk /a/long/path", "v " * 60, UNFIT, "do " * 60),
        CheckFinding("clock", "who knows", UNKNOWN),
        CheckFinding("CPUs", "busy", WARN, "end it"),
    ]
    text = check.as_text(judge_node("node3", found), found, 100)
    rows = [line for line in text.splitlines() if line[:1].strip()]
    assert all(len(line) <= 100 for line in text.splitlines()[:-1])
    column = rows[0].index("verdict")
    assert [row[column:].split()[0] for row in rows[2:-1]] == [FIT, UNFIT, "?", WARN]
    assert rows[-1].startswith("node3: unfit (disk /a/long/path: v v")
