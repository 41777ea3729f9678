"""`phalanx check` as a person runs it: what it prints and returns, alone and with other nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli import check
from phalanx.cli import main as phalanx
from phalanx.core.fitness import EXIT_CODES, FIT, UNFIT, UNKNOWN, WARN, CheckFinding, judge_node
from tests.support.run_helpers import PHALANX, ended, plain_environment

CHECK = [PHALANX[0], "check"]


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
