"""Thousands of bad days, golden traces, and how messages grow; see simulator.py for what is checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation.chaos import run_seed
from tests.simulation.requeue import run_requeued
from tests.simulation.scale import measure
from tests.simulation.script import Script

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


def play(seeds: range, run: Callable[[int], object] = run_seed) -> None:
    broken = []
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:  # noqa: BLE001 - all broken seeds are to be named, whatever broke
            broken.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("start", [0, 100, 200])
def test_no_seed_breaks_a_rule(start: int) -> None:
    play(range(start, start + 100))


@pytest.mark.parametrize("seed", [111, 505, 1352, 6238, 8953, 9975, 20337])
def test_seeds_that_broke_a_rule_once(seed: int) -> None:
    run_seed(seed)


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 10_000, 500))
def test_no_seed_of_ten_thousand_breaks_a_rule(start: int) -> None:
    play(range(start, start + 500))


def test_a_job_forms_again_under_its_old_id() -> None:
    play(range(200), run_requeued)


@pytest.mark.long
def test_a_job_forms_again_under_its_old_id_in_ten_thousand_seeds() -> None:
    play(range(10_000), run_requeued)


@pytest.mark.parametrize("seed", [3, 42])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first = run_seed(seed, tracing=True)
    assert len(first.trace) > 10
    assert run_seed(seed, tracing=True) == first


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    text = path.read_text()
    played = Script().play(text)
    if os.environ.get("PHALANX_GOLDEN") == "write":
        path.write_text(played)
    assert played == text or os.environ.get("PHALANX_GOLDEN") == "write"


def test_messages_grow_linearly() -> None:
    few, many = measure(100), measure(1000)
    for name in ("first_round", "reform", "end"):
        assert getattr(many, name) <= 10.5 * getattr(few, name), (few, many)
    assert many.per_node < 20
    assert many.megabytes <= 10.5 * few.megabytes, (few, many)


@pytest.mark.long
def test_messages_grow_linearly_to_ten_thousand_nodes() -> None:
    few, many = measure(1000), measure(10_000)
    assert many.per_node <= 1.05 * few.per_node, (few, many)
    assert many.first_megabytes < 50, many
