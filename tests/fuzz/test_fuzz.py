"""A short run of every fuzz target: with hypothesis always, with atheris where it is installed."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, seeds

SECONDS = 5  # of atheris for each target


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), noise=st.binary(max_size=60))
def test_damaged_input(name: str, seed: int, noise: bytes) -> None:
    """Valid bytes with a few changes reach more code than noise alone."""
    chance = random.Random(seed)
    data = bytearray(chance.choice(seeds(name)) + noise)
    for _ in range(chance.randrange(4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    TARGETS[name](bytes(data))
    TARGETS[name](noise)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_seconds_of_atheris(name: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()  # an empty one is filled with seeds
    arguments = [
        "-m",
        "tests.fuzz",
        name,
        f"-max_total_time={SECONDS}",
        f"-artifact_prefix={tmp_path}/",
        str(corpus),
    ]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
