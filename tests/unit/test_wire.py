"""Frames: whatever was sent comes out, whatever else comes in is refused and harms nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.rounds.store_commands import (
    Change,
    Delete,
    Entry,
    Get,
    Notice,
    Put,
    Reply,
    Txn,
    Watch,
    When,
)
from phalanx.errors import StoreAuthError, StoreError
from phalanx.store.net import wire
from phalanx.store.net.token import find_token

text, blob, number = st.text(max_size=20), st.binary(max_size=40), st.integers(0, 2**62)
entry = st.builds(Entry, text, blob, number, number, number)
bodies = st.one_of(
    st.builds(Put, text, blob, number),
    st.builds(Get, text, st.booleans()),
    st.builds(Watch, number, text, st.booleans(), number),
    st.builds(
        Txn,
        st.lists(st.builds(When, text, text, number, blob), max_size=3).map(tuple),
        st.lists(st.builds(Put, text, blob, number), max_size=3).map(tuple),
        st.lists(st.builds(Delete, text, st.booleans()), max_size=2).map(tuple),
    ),
    st.builds(Reply, st.booleans(), number, st.lists(entry, max_size=3).map(tuple), number, text),
    st.builds(
        Notice, number, st.lists(st.builds(Change, entry, st.booleans()), max_size=3).map(tuple), number
    ),
    st.builds(wire.Hello, text, text, text, number),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(number, number, bodies), max_size=5), st.integers(1, 9))
def test_frames_survive_any_cut(messages: list[tuple], piece: int) -> None:
    stream = b"".join(wire.encode(*message) for message in messages)
    frames, cutter = [], wire.Frames()
    for start in range(0, len(stream), piece):
        frames += cutter.feed(stream[start : start + piece])
    assert [tuple(frame) for frame in frames] == messages


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_with_one_kind_of_error(data: bytes) -> None:
    for parse in (wire.decode, wire.Frames(1000).feed):
        try:
            parse(data)
        except wire.WireError:
            pass


@settings(max_examples=400, deadline=None)
@given(bodies, st.data())
def test_a_damaged_frame_never_becomes_something_else_than_a_known_type(
    body: tuple, data: st.DataObject
) -> None:
    packed = bytearray(wire.encode(1, 1, body)[wire.HEADER :])
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        frame = wire.decode(packed)
    except wire.WireError:
        return
    assert type(frame.body) in wire._KINDS
    assert wire.decode(wire.encode(*frame)[wire.HEADER :]) == frame


def test_a_length_over_the_cap_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.Frames(1 << 20).feed((1 << 31).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "packed",
    [
        msgspec.msgpack.encode([99, 0, 0, []]),
        msgspec.msgpack.encode([4, 0, 0, ["key", "text, not bytes", "x"]]),
        msgspec.msgpack.encode([4, 0, 0, ["key"]]),
        msgspec.msgpack.encode({"kind": 4}),
        b"\x91" * 100_000,
        b"",
    ],
    ids=["unknown kind", "wrong types", "too short", "not an array", "very deep", "empty"],
)
def test_frames_of_the_wrong_shape(packed: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(packed)


@pytest.mark.parametrize("body", [Put("k", b"", 2**70), Put("\ud800", b"")], ids=["number", "text"])
def test_what_cannot_be_sent_says_so(body: Put) -> None:
    with pytest.raises(StoreError, match="Put cannot be sent"):
        wire.encode(1, 1, body)


def test_the_proof_binds_the_role_and_both_nonces() -> None:
    a, b = os.urandom(32), os.urandom(32)
    good = wire.proof(b"token", "client", a, b)
    assert wire.proves(good, b"token", "client", a, b)
    assert not wire.proves(good, b"other", "client", a, b)
    assert not wire.proves(good, b"token", "server", a, b)
    assert not wire.proves(good, b"token", "client", b, a)


def test_token_comes_from_the_variable_then_the_file_then_the_home(tmp_path: Path) -> None:
    named = tmp_path / "named"
    named.write_text("from-file\n")
    env = {"HOME": str(tmp_path), "PHALANX_TOKEN": "from-variable", "PHALANX_TOKEN_FILE": str(named)}
    assert find_token(env).secret == b"from-variable"
    del env["PHALANX_TOKEN"]
    assert find_token(env).secret == b"from-file"
    del env["PHALANX_TOKEN_FILE"]
    made = find_token(env)
    assert len(made.secret) == 64
    assert find_token(env) == made
    assert (tmp_path / ".phalanx" / "token").stat().st_mode & 0o777 == 0o600
    assert made.secret.decode() not in f"{made} {made!r}"


def test_a_token_that_is_missing_empty_or_open_says_what_to_fix(tmp_path: Path) -> None:
    with pytest.raises(StoreAuthError, match="PHALANX_TOKEN_FILE"):
        find_token({"HOME": str(tmp_path), "PHALANX_TOKEN_FILE": str(tmp_path / "none")})
    find_token({"HOME": str(tmp_path)})
    file = tmp_path / ".phalanx" / "token"
    file.chmod(0o644)
    with pytest.raises(StoreAuthError, match="chmod 600"):
        find_token({"HOME": str(tmp_path)})
    file.chmod(0o600)
    file.write_text("")
    with pytest.raises(StoreAuthError, match="0 bytes"):
        find_token({"HOME": str(tmp_path)})


def test_first_users_at_the_same_time_get_the_same_token(tmp_path: Path) -> None:
    code = "from phalanx.store.net.token import find_token; print(find_token().secret.decode())"
    env = {**os.environ, "HOME": str(tmp_path)}
    env.pop("PHALANX_TOKEN", None)
    users = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) for _ in range(4)
    ]
    assert len({user.communicate(timeout=60)[0] for user in users}) == 1
    assert [p.name for p in (tmp_path / ".phalanx").iterdir()] == ["token"]


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    """Not a directory named `~` where the job runs."""
    with pytest.raises(StoreAuthError, match="has no home directory for one; set PHALANX_TOKEN"):
        find_token({"HOME": "~"})
