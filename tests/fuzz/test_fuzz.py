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

from phalanx.core.commands import Add, Delete, Get, Grant, KeepAlive, Notice, Put, Reply, Txn, Watch, When
from phalanx.store import torch_tcp, wire
from tests.fuzz.targets import TARGETS

SECONDS = 5  # of atheris for each target
_SPOKEN = (
    Put("k", b"v", 1), Get("k", True), Delete("k"), Add("n", 5), Grant(2.5), KeepAlive(1), Watch(1, "k", True, 1),
    Txn((When("k", "value", value=b"v"),), (Put("a", b""),), (Delete("b", True),)), Reply(True, 3), Notice(1, (), 2),
)  # fmt: skip


def _torch(op: int, *fields: bytes) -> bytes:
    return bytes([op]) + b"".join(torch_tcp.UINT64.pack(len(field)) + field for field in fields)


def seeds(name: str) -> list[bytes]:
    """Something sensible to start from, each with its cutting byte."""
    if name in ("wire", "commands"):
        packed = [wire.encode(n + 1, 1, body) for n, body in enumerate(_SPOKEN)]
        cut = b"\x07" * (name == "wire")
        return [cut + one for one in packed] + [cut + b"".join(packed)]
    if name == "torch":
        sets = _torch(torch_tcp.SET, b"key", b"value")
        return [
            b"\x03" + sets,
            b"\x09" + sets * 3,
            b"\x01" + bytes([torch_tcp.GETNUMKEYS, torch_tcp.LIST_KEYS]),
        ]
    return [
        b'{"header":{"revision":"3"},"events":[{"type":"DELETE","kv":{"key":"YQ==","mod_revision":"3"}}]}'
    ]


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), noise=st.binary(max_size=60))
def test_damaged_speech(name: str, seed: int, noise: bytes) -> None:
    """Sensible bytes with some of them changed get further than noise alone."""
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
    corpus.mkdir()
    for number, seed in enumerate(seeds(name)):
        (corpus / str(number)).write_bytes(seed)
    words = [
        "-m",
        "tests.fuzz",
        name,
        f"-max_total_time={SECONDS}",
        f"-artifact_prefix={tmp_path}/",
        str(corpus),
    ]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
