"""The benchmark driver: the sides, interleaved samples, and the comparison with another checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench import __main__ as driver
from bench import measure
from bench.measure import OTHER, OURS, THEIRS, FailedRun, Target, compare, interleave


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another checkout, without an environment of its own."""
    monkeypatch.setenv("BENCH_AGAINST", str(tmp_path))
    (tmp_path / "src" / "phalanx").mkdir(parents=True)
    return tmp_path


def test_without_another_checkout_there_is_one_phalanx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_AGAINST", raising=False)
    assert measure.phalanx_sides() == (OURS,)
    assert OTHER not in driver.head()


def test_the_other_checkout_uses_its_own_environment_if_it_has_one(checkout: Path) -> None:
    assert measure.phalanx_sides() == (OURS, OTHER)
    assert measure.python(OTHER) == sys.executable
    assert measure.environment(OTHER)["PYTHONPATH"] == f"{checkout}/src"
    folder = checkout / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "phalanx").touch()
    assert measure.python(OTHER) == str(folder / "python")
    assert measure.program(OTHER) == [str(folder / "phalanx"), "run"]
    assert measure.environment(OTHER).get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert measure.python(OURS) == sys.executable


def test_samples_alternate_and_both_medians_and_their_ratio_are_shown(checkout: Path) -> None:
    order = []

    def once(side: str) -> dict[str, float]:
        order.append(side)
        return {"seconds": {THEIRS: 8.0, OURS: 3.0, OTHER: 2.0}[side]}

    samples = interleave(once, 2, names=(THEIRS, OURS, OTHER), warm=False)
    assert order == [THEIRS, OURS, OTHER, OTHER, OURS, THEIRS]
    row = compare("key", "what", "s", Target(1 / 2), samples, "seconds")
    assert (row.theirs, row.ours, row.other, row.against, row.met) == (8.0, 3.0, 2.0, 1.5, True)
    assert driver.text(row).split()[-3:] == ["2.00", "s", "1.500"]
    assert row.as_json()["against"] == 1.5


def test_failed_samples_are_counted() -> None:
    def once(side: str) -> dict[str, float]:
        raise FailedRun("no figure")

    row = compare("key", "what", "s", None, interleave(once, 2, names=(OURS,), warm=False), "seconds")
    assert row.ours is None
    assert row.notes == [f"{OURS}: 2 of 2 samples failed: no figure"]


def test_a_folder_that_is_not_a_checkout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--against", str(tmp_path)])
    with pytest.raises(SystemExit):
        driver.main()
    assert "not a checkout" in capsys.readouterr().err
