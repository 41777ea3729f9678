"""What people see of a job: the live view as pure lines, keys, and the words of the commands."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.events import in_words
from phalanx.cli.logs import LogReader, WrittenLog, chosen, files
from phalanx.cli.run_list import entries, table
from phalanx.cli.runs import since_of
from phalanx.cli.stacks import text
from phalanx.cli.watch import WatchView, press, screen
from phalanx.core.ledger.goodput import CATEGORIES
from phalanx.errors import UsageError
from phalanx.observe import run_registry
from phalanx.observe.snapshot import (
    IncidentSnapshot,
    JobSnapshot,
    LedgerSnapshot,
    QuarantineSnapshot,
    RunFile,
    WorkerSnapshot,
    totals_of,
)

EVIL = "\x1b]0;owned\x07\n\r\x9b2J"
PLAIN = re.compile(r"\x1b\[[0-9;]*m")


def worker(rank: int, **more: Any) -> WorkerSnapshot:
    plain = {"pid": 100 + rank, "running": True, "ready": True, "state": "ready", "step": 50, "quiet": 0.1}
    return WorkerSnapshot(rank, **{**plain, **more})


def job(ranks: int = 4, **more: Any) -> JobSnapshot:
    ledger = LedgerSnapshot(ranks, 0.9, {"productive": 90.0, "recovering": 10.0}, {})
    plain: dict[str, Any] = {
        "world_size": ranks,
        "ledger": ledger,
        "workers": [worker(r) for r in range(ranks)],
    }
    return JobSnapshot(
        "job7", "train.py", "node-a", 42, 1000.0, 1090.0, "RUNNING", "running", **{**plain, **more}
    )


def lines(shown: list[str]) -> list[str]:
    return [PLAIN.sub("", line) for line in shown]


def test_the_screen_lists_hosts_that_are_kept_out() -> None:
    out = [QuarantineSnapshot("gpu-7", "lost" + EVIL, 600.0), QuarantineSnapshot("gpu-8", "XID 79")]
    shown = lines(screen(job(quarantine=out), WatchView(), 80, 24))
    assert shown[2].startswith("quarantined: gpu-7: lost")
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", "".join(shown))
    assert shown[3] == "quarantined: gpu-8: XID 79 (until removed)"
    many = [QuarantineSnapshot(f"n{number}", "slow", 9.0) for number in range(500)]
    shown = lines(screen(job(quarantine=many), WatchView(), 80, 24))
    assert shown[4] == "quarantined: 498 more hosts: see phalanx quarantine"
    assert len(shown) == 24
    assert not any("quarantined" in line for line in lines(screen(job(), WatchView(), 80, 24)))


def test_a_screen_has_everything_and_fits() -> None:
    incident = IncidentSnapshot(
        1, "rank 2: SIGKILL; restart 1 of 3", "failure", "restart", timestamp=1080.0, total=0.2
    )
    workers = [worker(r, step=50 if r != 3 else 10, last_line=f"loss {r}") for r in range(4)]
    shown = screen(
        job(workers=workers, records=[incident], incident_count=1, restarts=1), WatchView(), 80, 24
    )
    seen = lines(shown)
    assert len(seen) == 24
    assert max(map(len, seen)) <= 80
    assert seen[0].startswith("train.py run job7, running for 90.0 s, 4 ranks, restart 1 of 0")
    assert "goodput 90.0 %  recovering 2.5 s" in seen[1]
    assert seen[2] == "     0  ■■■▼"
    assert seen[4].split()[:2] == ["3", "ready"], "the one that is behind comes first"
    assert any("SIGKILL" in line for line in seen)
    assert any(line.endswith("rank 1 loss 1") for line in seen)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5), (10, 1), (300, 80)])
def test_no_size_and_no_text_breaks_the_screen(width: int, height: int) -> None:
    evil = JobSnapshot(
        EVIL, EVIL, EVIL, 1, 0.0, 1.0, EVIL, EVIL, EVIL, nodes=[EVIL, EVIL], incident_count=1,
        workers=[worker(0, state=EVIL, section=EVIL, last_line=EVIL * 50)],
        records=[IncidentSnapshot(1, EVIL, recovery=EVIL)],
    )  # fmt: skip
    for view in (WatchView(), WatchView(typing="1-"), WatchView(ranks="7"), WatchView(colour=False)):
        shown = screen(evil, view, width, height)
        assert len(shown) <= height
        for line in lines(shown):
            assert len(line) <= width
            assert line.isprintable()


def test_four_thousand_ranks_are_a_grid_of_a_quarter_of_the_screen() -> None:
    seen = lines(screen(job(4096), WatchView(), 80, 24))
    assert len(seen) == 24
    assert any("more ranks, 0 of them behind or down" in line for line in seen)


def test_a_job_that_is_gone_says_so() -> None:
    assert screen(None, WatchView(), 80, 24, "run job7 has ended") == ["run job7 has ended"]


def test_keys() -> None:
    view: WatchView | None = WatchView()
    for key in ["j", "j", "k", "/", "3", "x", "-", "9", "\x7f", "5", "\r"]:
        assert view is not None
        view = press(view, key)
    assert view is not None
    assert (view.ranks, view.typing, view.scroll) == ("3-5", None, 0)
    assert grid(view) == "ranks 3-5"
    assert press(view, "q") is None
    assert press(view._replace(typing="1"), "q") == view._replace(typing="1"), "a q in a filter is no end"
    assert press(view, "a") == view._replace(ranks="")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("0,5-7", "ranks 0, 5-7"), ("3-", "ranks 0-7"), ("7-3", "ranks 0-7"), ("", "ranks 0-7")],
)
def test_a_filter_that_is_not_complete_shows_all(typed: str, expected: str) -> None:
    assert grid(WatchView(ranks=typed)) == expected


def grid(view: WatchView) -> str:
    """The ranks that the screen has."""
    workers = [worker(rank, last_line="alike") for rank in range(8)]
    (line,) = (
        line for line in lines(screen(job(8, workers=workers), view, 80, 40)) if line.endswith(" alike")
    )
    return line.removesuffix(" alike").strip()


def test_a_whole_job_adds_its_nodes_up_and_leaves_spares_out() -> None:
    half = LedgerSnapshot(2, 0.5, {"productive": 1.0, "nodes": 1.0}, {"1": {"recovering": 0.0}})
    spare = JobSnapshot("job7", "t", "c", 3, 0.0, 1.0, "JOINING", "spare", ledger=half)
    found = totals_of(job(2, ledger=half, peers=[job(2, ledger=half), spare]))
    assert (found.ranks, found.total, found.ratio) == (4, 4.0, 0.5)
    assert set(found.seconds) == set(CATEGORIES)


# ---- words -------------------------------------------------------------------------------------------


def test_times() -> None:
    assert since_of("") is None
    assert since_of("2h") == pytest.approx(time.time() - 7200, abs=5)
    assert since_of("1970-01-02T00:00+00:00") == 86400.0
    with pytest.raises(UsageError, match="--since soon"):
        since_of("soon")


def test_stacks_are_grouped_and_escaped() -> None:
    one = {"rank": 0, "pid": 7, "host": f"a{EVIL}", "stack": ["/x/train.py:3 in load"], "stopped": False}
    same = [{**one, "rank": rank} for rank in (0, 1, 2)]
    shown = text([*same, {**one, "rank": 3, "stack": []}, {"rank": 4, "stopped": True, "stack": 5}])
    assert all(char.isprintable() or char == "\n" for char in shown)
    told = shown.splitlines()
    assert told[0].startswith("rank 3: pid 7 on a")
    assert "no Python stack" in told[1]
    assert "kill -CONT" in told[3]
    assert told[4].startswith("ranks 0-2: ")
    assert told[5] == "  train.py:3 in load"


def test_events_in_words() -> None:
    told = in_words({"time": 1e9, "host": EVIL, "kind": "incident", "number": 1, "reason": EVIL, "stop": 0.5})
    assert told.isprintable()
    assert told.endswith("[stopped in 0.500 s]")
    assert in_words({"time": "soon", "text": 7}).endswith(": 7")


def test_the_table_of_runs_is_escaped() -> None:
    row = {"run": EVIL, "name": EVIL, "state": EVIL, "logs": EVIL, "since": 0.0, "until": None, "restarts": 0}
    shown = table([{**row, "goodput": 0.5}])
    assert shown.count("\n") == 2
    assert all(char.isprintable() or char == "\n" for char in shown)


# ---- logs --------------------------------------------------------------------------------------------


def test_the_log_files_of_a_run_are_those_where_they_belong(tmp_path: Path) -> None:
    for name in (
        "attempt_0/0",
        "attempt_0/1",
        "attempt_1/0",
        "attempt_1/1",
        "attempt_1.1/0",
        "other/0",
        "attempt_2",
    ):
        (tmp_path / name).mkdir(parents=True)
        if name.count("/"):
            (tmp_path / name / "stdout.log").write_text("x\n")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "attempt_1.1" / "0" / "stderr.log").symlink_to(secret)
    (tmp_path / "attempt_3").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "attempt_1" / "0" / "stderr.log")
    run = RunFile("r", "n", "h", 1, 0.0, str(tmp_path), ranks=[4, 5])
    assert [(one.attempt, one.again, one.rank) for one in files(run)] == [
        (0, 0, 4), (0, 0, 5), (1, 0, 4), (1, 0, 5), (1, 1, 4),
    ]  # fmt: skip
    assert [one.again for one in chosen(run, None, None)] == [1]
    assert [one.rank for one in chosen(run, {5}, 0)] == [5]
    assert chosen(run, None, None, since=time.time() + 60) == []


def test_a_log_is_read_line_by_line_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    reader = LogReader(WrittenLog(str(path), 0, 0, 0, "stdout"))
    assert list(reader.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(reader.lines()) == ["one"]
    with path.open("ab") as file:
        file.write(b"o\n\xff")
    assert list(reader.lines()) == ["two"]
    assert list(reader.lines(last=True)) == ["�"]
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    assert sum(map(len, reader.lines())) == 200_000, "a line without an end is not kept in memory"


# ---- the registry ------------------------------------------------------------------------------------


def record(run: str, since: float, **more: Any) -> dict[str, Any]:
    return {"run": run, "name": "n", "host": "h", "pid": 1, "since": since, **more}


def test_a_job_of_many_machines_with_one_home_does_not_push_out_history(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    for number in range(5):
        run_registry.note(environ, record(f"small-{number}", number, outcome="SUCCEEDED"), "login")
    for number in range(run_registry.KEPT + 50):
        run_registry.note(environ, record("large", 100.0 + number / 10, pid=number), f"node-{number}")
    run_registry.note(environ, record("large", 400.0), "node-7")
    expected = [*(f"small-{number}" for number in range(5)), "large", "large"]
    for machine, first in (("login", "node-0"), ("elsewhere", "node-0"), ("node-7", "node-7")):
        found = run_registry.runs(environ, machine)
        assert [one.run for one in found] == expected
        assert [one.machine for one in found[5:]] == [first, "node-7"]


def test_machines_that_have_not_written_for_longest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods have a new name every time."""
    monkeypatch.setattr(run_registry, "_MACHINES", 3)
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    for number in range(6):
        run_registry.note(environ, record(f"r{number}", number), f"pod-{number}")
        os.utime(tmp_path / "phalanx" / "runs" / f"pod-{number}", (number, number))
    assert [one.machine for one in run_registry.runs(environ)] == ["pod-3", "pod-4", "pod-5"]


def test_a_run_on_another_machine_is_not_called_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run_registry.note(os.environ, record("here", 1.0))
    run_registry.note(os.environ, record("there", 2.0), "node-7")
    run_registry.note(os.environ, record("over", 3.0, outcome="FAILED", until=4.0), "node-7")
    rows = entries([])
    assert [(row["run"], row["state"]) for row in rows] == [
        ("here", "killed"),
        ("there", "unknown"),
        ("over", "FAILED"),
    ]
    assert [row["why"] for row in rows] == ["", "began on node-7", ""]
    assert "began on node-7" in table(rows).splitlines()[2]


def test_the_registry_keeps_the_newest_runs_and_believes_only_its_user(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_STATE_HOME": "relative is ignored"}
    folder = tmp_path / ".local" / "state" / "phalanx" / "runs" / run_registry.this_machine()
    assert run_registry.runs(environ) == []
    for number in range(run_registry.KEPT + 5):
        run_registry.note(environ, record(f"r{number}", number))
    found = run_registry.runs(environ)
    assert (len(found), found[0].run, found[-1].run) == (run_registry.KEPT, "r5", f"r{run_registry.KEPT + 4}")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    victims = sorted(folder.iterdir())
    victims[0].write_text("not json")
    victims[1].chmod(0o666)
    victims[2].unlink()
    os.mkfifo(victims[2])
    victims[3].unlink()
    victims[3].symlink_to(victims[4])
    victims[5].write_bytes(b"[" * 100_000)
    assert len(run_registry.runs(environ)) == run_registry.KEPT - 5
    folder.chmod(0o777)
    assert run_registry.runs(environ) == []
    assert run_registry.directory({}) is None
    run_registry.note({}, {"run": "r"})
