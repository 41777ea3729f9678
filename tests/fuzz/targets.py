"""Properties that hold for any bytes; each target takes bytes and raises if its property does not hold.

Used by atheris (`python -m tests.fuzz wire`) and, with a few examples, by hypothesis in `test_fuzz.py`. The
first byte is the chunk size of the stream, which must not matter to a parser.
"""

from __future__ import annotations

import msgspec

from phalanx.core.rounds.store_commands import (
    Add,
    Delete,
    Get,
    Grant,
    KeepAlive,
    Notice,
    Put,
    Reply,
    Txn,
    Watch,
    When,
)
from phalanx.store.etcd import requests as etcd_requests
from phalanx.store.etcd.watch import MALFORMED
from phalanx.store.model import Model
from phalanx.store.net import wire
from phalanx.store.tcpstore import protocol as torch_tcp
from phalanx.store.tcpstore.protocol import MAGIC, UINT32, VALIDATE, Request, RequestParser

CAP = 4096


def _pieces(data: bytes) -> list[bytes]:
    size = data[0] % 61 + 1 if data else 1
    rest = data[1:]
    return [rest[start : start + size] for start in range(0, len(rest), size)]


def frames(data: bytes) -> None:
    """Frames: only known types are decoded, independent of the chunks, and encode to the same bytes."""
    whole, pieces = wire.Frames(CAP), wire.Frames(CAP)
    try:
        expected: list[wire.Frame] | None = whole.feed(data[1:])
    except wire.WireError:
        expected = None
    found: list[wire.Frame] = []
    try:
        for piece in _pieces(data):
            found += pieces.feed(piece)
            assert len(pieces._buffer) <= CAP + wire.HEADER
    except wire.WireError:
        assert expected is None
    else:
        # Not by value: a NaN does not equal itself.
        assert expected is not None
        assert list(map(_packed, found)) == list(map(_packed, expected))
    for frame in found:
        assert type(frame.body) in wire._KINDS
        again = wire.decode(_packed(frame)[wire.HEADER :])
        assert _packed(again) == _packed(frame)


def _packed(frame: wire.Frame) -> bytes:
    return wire.encode(*frame)


def commands(data: bytes) -> None:
    """Commands: the store carries out or refuses whatever an authenticated client sends."""
    model, now = Model(history=50, history_bytes=1000), 0.0
    cutter = wire.Frames(CAP)
    try:
        found = cutter.feed(data)
    except wire.WireError:
        return
    for frame in found:
        if isinstance(frame.body, (wire.Hello, wire.Welcome, Reply, Notice)):
            continue
        now += 0.5
        before = model.revision
        reply, notices = model.apply("session", frame.number, frame.done, frame.body, now)
        assert before <= model.revision <= before + 1
        wire.encode(frame.number, frame.done, reply)
        for _, notice in notices:
            wire.encode(0, 0, notice)
        model.expire(now)
    again = Model()
    again.load(msgspec.msgpack.decode(msgspec.msgpack.encode(model.dump())), now)
    assert again.revision == model.revision


def torch_requests(data: bytes) -> None:
    """torch's protocol: the same requests for any chunks, and nothing after an error."""
    opening = bytes([VALIDATE]) + UINT32.pack(MAGIC)
    whole, pieces = RequestParser(), RequestParser()
    expected = whole.feed(opening + data[1:])
    found: list[Request] = pieces.feed(opening)
    for piece in _pieces(data):
        found += pieces.feed(piece)
    assert found == expected
    assert str(whole.error) == str(pieces.error)
    if pieces.error is not None:
        assert pieces.feed(data) == []
    else:
        assert pieces.missing > 0
    RequestParser().feed(data)


def etcd_answers(data: bytes) -> None:
    """etcd: a watch survives JSON of any shape."""
    try:
        message = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if not isinstance(message, dict):
        return
    for read in (etcd_requests.decode_notice, etcd_requests.snapshot):
        try:
            read(1, message)
        except MALFORMED:
            pass


TARGETS = {"wire": frames, "commands": commands, "torch": torch_requests, "etcd": etcd_answers}


_COMMANDS = (
    Put("k", b"v", 1), Get("k", True), Delete("k"), Add("n", 5), Grant(2.5), KeepAlive(1),
    Txn((When("k", "value", value=b"v"),), (Put("a", b""),), (Delete("b", True),)),
    Watch(1, "k", True, 1), Reply(True, 3), Notice(1, (), 2),
)  # fmt: skip


def _torch(op: int, *fields: bytes) -> bytes:
    return bytes([op]) + b"".join(torch_tcp.UINT64.pack(len(field)) + field for field in fields)


def seeds(name: str) -> list[bytes]:
    """Valid inputs, each with its chunk size."""
    if name in ("wire", "commands"):
        packed = [wire.encode(n + 1, 1, body) for n, body in enumerate(_COMMANDS)]
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
