"""Questions to all nodes of a job over a real store: each is answered once, in time, and within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phalanx.cluster.node_requests import (
    ASK,
    LONGEST_ANSWER,
    NodeRequests,
    ask_nodes,
    decode_answer,
    decode_question,
    encode_answer,
    encode_question,
    told_prefix,
)
from phalanx.core.rounds.store_commands import Notice, Put
from phalanx.errors import StoreTimeoutError
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net.token import Token
from tests.conftest import HUNG
from tests.system.test_store_server import Proxy

TOKEN = Token(b"0123456789abcdef0123456789abcdef", "the test")
PREFIX = "job/r/"


class NodeOfJob:
    """A node as far as questions go: its key, its watch, its answers."""

    def __init__(self, client: Client, name: str, *, trusts: bool = True, mute: bool = False) -> None:
        self.client, self.name, self.mute = client, name, mute
        self.heard: list[dict[str, Any]] = []
        client.put(f"{PREFIX}node/{name}", b"{}")
        self.requests = NodeRequests(lambda: name, lambda: trusts, self.handle, self.send)
        client.watch(PREFIX + "ctl/", self.notice, prefix=True)

    def notice(self, notice: Notice) -> None:
        for entry, deleted in notice.changes:
            if not deleted:
                self.requests.learn(entry.key.removeprefix(PREFIX), entry.value, news=not notice.reset)

    def handle(self, request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        self.heard.append(request)
        if not self.mute:
            answer({"host": self.name})

    def send(self, value: bytes) -> None:
        self.client.send(Put(told_prefix("r") + self.name, value), lambda reply: None)


@pytest.fixture
def store() -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []
    with Server("127.0.0.1", 0, token=TOKEN) as server:

        def connect() -> Client:
            client = Client(*server.address[:2], token=TOKEN, grace=HUNG).connect(HUNG)
            clients.append(client)
            return client

        try:
            yield connect
        finally:
            for client in clients:
                client.close()


def test_every_other_node_answers_once(store: Callable[[], Client]) -> None:
    nodes = [NodeOfJob(store(), name) for name in "abc"]
    found, silent = ask_nodes(nodes[0].client, "r", {"ask": "status"}, HUNG, "a")
    assert silent == 0
    assert {name: json.loads(bytes(answer)) for name, answer in found.items()} == {
        "b": {"host": "b"},
        "c": {"host": "c"},
    }
    assert [node.heard for node in nodes] == [[], [{"ask": "status"}], [{"ask": "status"}]]
    asker = store()  # not a node, as a command on another machine is not
    found, silent = ask_nodes(asker, "r", {"ask": "stacks"}, HUNG)
    assert sorted(found) == ["a", "b", "c"]
    late = NodeOfJob(store(), "d")
    found, _ = ask_nodes(asker, "r", {"ask": "logs"}, HUNG)
    assert sorted(found) == ["a", "b", "c", "d"]
    assert late.heard == [{"ask": "logs"}], "what was asked before it came is not for it"


def test_a_node_that_does_not_answer_is_counted_and_not_waited_for_long(store: Callable[[], Client]) -> None:
    nodes = [NodeOfJob(store(), "a"), NodeOfJob(store(), "b"), NodeOfJob(store(), "c", mute=True)]
    found, silent = ask_nodes(nodes[0].client, "r", {}, 1.0, "a")
    assert (sorted(found), silent) == (["b"], 1)


def test_a_store_that_is_away_is_not_waited_for_longer_than_asked() -> None:
    """The first message is the one that waits: nothing else is asked before it is answered."""
    with Server("127.0.0.1", 0, token=TOKEN) as server, Proxy(server.address) as way:
        client = Client(*way.address, token=TOKEN, grace=10 * HUNG).connect(HUNG)
        with client:
            way.hush(1000)
            with pytest.raises(StoreTimeoutError):
                ask_nodes(client, "r", {"ask": "status"}, 0.2)


def test_deeds_need_a_store_that_knows_its_clients(store: Callable[[], Client]) -> None:
    node = NodeOfJob(store(), "a", trusts=False)
    found, _ = ask_nodes(store(), "r", {"do": "stop"}, HUNG)
    assert "open to everyone" in json.loads(bytes(found["a"]))["error"]
    assert node.heard == []


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"7",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 9999,
        b'{"id": 1, "request": {}}',
        b'{"id": "x"}',
        b"x" * (1 << 20),
    ],
)
def test_what_is_no_question_is_ignored(value: bytes) -> None:
    assert decode_question(value) is None
    asked: list[Any] = []
    requests = NodeRequests(lambda: "a", lambda: True, lambda *what: asked.append(what), lambda _value: None)
    requests.learn(ASK, value, news=True)
    assert asked == []


def test_a_question_that_is_found_or_comes_again_is_not_answered() -> None:
    asked: list[Any] = []
    requests = NodeRequests(
        lambda: "a", lambda: True, lambda request, _: asked.append(request), lambda _value: None
    )
    _, old = encode_question({"do": "stop"}, "b")
    _, new = encode_question({"do": "restart"}, "b")
    requests.learn(ASK, old, news=False)
    requests.learn(ASK, old, news=True)
    requests.learn(ASK, new, news=True)
    requests.learn(ASK, new, news=True)
    requests.learn("ctl/round", new, news=True)
    assert asked == [{"do": "restart"}]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b"7",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"id": "7"}',
        b'{"id": 7, "answer": {}}',
        b'{"id": "8", "answer": {}}',
        b'{"id": "7", "answer": []}',
        b'{"id": "7", "answer": {"x": "\xff"}}',
        b'{"id": "7", "answer": {"x": nonsense}}',
        b'{"id": "7", "answer": {"x": 1}',
        b'{"id": "7", "answer": {}, "x": "' + b"x" * (2 * LONGEST_ANSWER) + b'"}',
    ],
)
def test_what_is_no_answer_is_not_passed_on(value: bytes) -> None:
    assert decode_answer(value, "7") is None


def test_an_answer_is_bounded() -> None:
    good = decode_answer(encode_answer("7", {"host": "\u00e4"}), "7")
    assert good is not None
    assert json.loads(bytes(good)) == {"host": "\u00e4"}
    long = {"host": "a", "workers": ["x" * 1000] * 1000}
    assert json.loads(encode_answer("7", long))["answer"]["workers"] == []
    assert "too long" in json.loads(encode_answer("7", {"x": "x" * LONGEST_ANSWER}))["answer"]["error"]
