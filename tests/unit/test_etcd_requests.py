"""The store's commands as etcd requests and its answers as replies; endpoints and configurations."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.rounds.store_commands import Change, Delete, Entry, Grant, Notice, Put, Txn, Watch, When
from phalanx.errors import StoreError, UsageError
from phalanx.store.etcd import requests
from phalanx.store.etcd.client import etcd_client_from
from phalanx.store.etcd.http import Address, EtcdError
from phalanx.store.etcd.requests import EtcdRequests


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_a_prefix_is_a_range_up_to_the_first_key_without_it() -> None:
    assert requests.key_range("a/", True) == {"key": b64("a/"), "range_end": b64("a0")}
    assert requests.key_range("a/", False) == {"key": b64("a/")}
    assert requests.key_range("", True) == {"key": "AA==", "range_end": "AA=="}


@given(st.text(min_size=1), st.text())
def test_every_key_under_a_prefix_lies_in_its_range(prefix: str, rest: str) -> None:
    try:
        (prefix + rest).encode()
    except UnicodeEncodeError:
        with pytest.raises(StoreError, match="cannot be sent"):
            requests.encode_key(prefix + rest)
        return
    asked = requests.key_range(prefix, True)
    begin, end = (base64.b64decode(asked[name]) for name in ("key", "range_end"))
    assert begin <= (prefix + rest).encode() < end


def test_a_transaction_reads_what_it_compares_either_way() -> None:
    txn = Txn((When("k", "mod", 7), When("v", "value", value=b"x")), (Put("k", b"new", 9),), (Delete("d"),))
    body = requests.transaction(txn, requests.SessionKey("once", b"5", 3, 11))
    reads = [{"request_range": {"key": b64(key)}} for key in ("k", "v")]
    assert body["compare"] == [
        {"key": b64("k"), "target": "MOD", "result": "EQUAL", "mod_revision": "7"},
        {"key": b64("v"), "target": "VALUE", "result": "EQUAL", "value": b64("x")},
        {"key": b64("once"), "target": "MOD", "result": "EQUAL", "mod_revision": "3"},
    ]
    assert body["success"] == [
        {"request_put": {"key": b64("k"), "value": b64("new"), "lease": "9"}},
        {"request_delete_range": {"key": b64("d")}},
        {"request_put": {"key": b64("once"), "value": b64("5"), "lease": "11"}},
        *reads,
    ]
    assert body["failure"] == [*reads, {"request_range": {"key": b64("once")}}]


def test_duplicate_keys_are_sent_once() -> None:
    txn = Txn(
        (), (Put("a", b"1"), Put("a", b"2"), Put("p/x", b"3")), (Delete("p/", True), Delete("p/", True))
    )
    assert [list(op) for op in requests.transaction(txn, None)["success"]] == [
        ["request_put"],
        ["request_delete_range"],
    ]


def kv(key: str, value: str, mod: int, lease: int = 0) -> dict[str, Any]:
    found = {"key": b64(key), "value": b64(value), "create_revision": "2", "mod_revision": str(mod)}
    return {**found, "lease": str(lease)} if lease else found


def test_answers_leave_out_what_is_zero() -> None:
    assert requests.decode_entry({"key": b64("k"), "mod_revision": "4"}) == Entry("k", b"", 0, 4, 0)
    assert requests.decode_entries({"header": {}}) == ()
    assert requests.revision_of({}) == 0


def test_the_outcome_of_a_transaction() -> None:
    txn, once = Txn((When("k", "mod", 0), When("gone", "mod", 0))), requests.SessionKey("once", b"5", 3, 11)
    shown = [{"response_range": {"kvs": [kv("k", "v", 9, 77)]}}, {"response_range": {}}]
    good = requests.decode_outcome(
        txn,
        once,
        {"header": {"revision": "9"}, "succeeded": True, "responses": [{"response_put": {}}, *shown]},
    )
    assert good == requests.TxnOutcome(True, 9, (Entry("k", b"v", 2, 9, 77), Entry("gone")), None)
    memory = {"response_range": {"kvs": [kv("once", "5", 8)]}}
    bad = requests.decode_outcome(txn, once, {"header": {"revision": "9"}, "responses": [*shown, memory]})
    assert (bad.ok, bad.entries, bad.session_entry) == (False, good.entries, Entry("once", b"5", 2, 8))


def test_messages_of_a_watch() -> None:
    message = {
        "header": {"revision": "12"},
        "events": [
            {"kv": kv("a", "1", 10)},
            {"type": "DELETE", "kv": {"key": b64("b"), "mod_revision": "11"}},
        ],
    }
    changes = (Change(Entry("a", b"1", 2, 10)), Change(Entry("b", b"", 0, 11), True))
    assert requests.decode_notice(3, message) == Notice(3, changes, 11)
    assert requests.decode_notice(3, {"created": True}) is None
    assert requests.compacted_to({"canceled": True, "compact_revision": "8"}) == 8
    assert requests.compacted_to({"canceled": True}) == 0
    reset = requests.snapshot(3, {"header": {"revision": "20"}, "kvs": [kv("a", "1", 10)]})
    assert reset == Notice(3, changes[:1], 20, reset=True)
    request = requests.watch_request(Watch(3, "k", start=5), 5)
    assert request == {"create_request": {"key": b64("k"), "start_revision": "5"}}


def test_leases_are_whole_seconds_and_never_shorter_than_asked() -> None:
    assert [requests.lease_seconds(Grant(ttl)) for ttl in (0.1, 1.0, 2.5, 600.0)] == [1, 1, 3, 600]


class Etcd:
    """Answers with each reply in turn; raises it if it is an exception."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []

    def __call__(self, path: str, body: requests.Json) -> requests.Json:
        self.asked.append((path, body))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


def test_a_transaction_carried_out_by_an_earlier_try_is_a_success() -> None:
    once = {"response_range": {"kvs": [kv("phalanx.once/s", "4", 8, 5)]}}
    etcd = Etcd({"ID": "5"}, {"header": {"revision": "8"}, "responses": [once]})
    assert EtcdRequests("s", etcd).carry_out(4, Put("k", b"v")).ok


def test_a_failed_condition_is_not_mistaken_for_an_earlier_try() -> None:
    """The session's key is unchanged: so the caller's condition has failed."""
    refused = {
        "header": {"revision": "8"},
        "responses": [{"response_range": {"kvs": [kv("k", "other", 7)]}}, {"response_range": {}}],
    }
    etcd = Etcd({"ID": "5"}, refused)
    reply = EtcdRequests("s", etcd).carry_out(4, Txn((When("k", "mod", 0),), (Put("k", b"v"),)))
    assert (reply.ok, reply.error, reply.entries[0].value) == (False, "condition", b"other")


def test_joining_is_one_grant_and_one_transaction() -> None:
    written = {"header": {"revision": "8"}, "succeeded": True, "responses": []}
    found = {"response_range": {"kvs": [kv("node", "n", 8, 7)]}}
    etcd = Etcd({}, {}, {**written, "responses": [{}, {}, {}, found]})
    joins = Txn((When("node", "mod", 0),), (Put("node", b"n"), Put("leader", b"n", new=True)))
    reply = EtcdRequests("s", etcd).carry_out(1, Grant(6.0, joins))
    grant, _, (path, body) = etcd.asked  # between them, once in a session: the lease of the session's key
    assert (grant[0], path) == ("/v3/lease/grant", "/v3/kv/txn")
    assert (reply.ok, reply.entries[0].value, str(reply.number)) == (True, b"n", grant[1]["ID"])
    lease = grant[1]["ID"]
    leader = {"request_put": {"key": b64("leader"), "value": b64("n"), "lease": lease}}
    absent = {"key": b64("leader"), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
    assert body["success"][:2] == [
        {"request_put": {"key": b64("node"), "value": b64("n"), "lease": lease}},
        {"request_txn": {"compare": [absent], "success": [leader]}},
    ]


def test_temporary_and_permanent_errors() -> None:
    assert EtcdError(14, "etcdserver: no leader").temporary
    assert EtcdError(8, "etcdserver: too many requests").temporary
    assert not EtcdError(8, "etcdserver: mvcc: database space exceeded").temporary
    assert EtcdError(16, "etcdserver: invalid auth token").expired_login
    assert EtcdError(3, "etcdserver: request is too large").too_large


def test_endpoints() -> None:
    def addresses(endpoint: str) -> list[Address]:
        client = etcd_client_from(endpoint, {})
        client.close()
        return client._members.addresses

    assert addresses("a") == [Address("a", 2379)]
    assert addresses("a:1, [::1]:2,http://c/") == [Address("a", 1), Address("::1", 2), Address("c", 2379)]


@pytest.mark.parametrize(
    ("endpoint", "config", "message"),
    [
        ("", {}, "at least one HOST:PORT"),
        ("a:b", {}, "must be a number"),
        ("a", {"password": "x"}, "set PHALANX_ETCD_PASSWORD"),
        ("a", {"user": "me"}, "'me' has no password"),
        ("a", {"user": "me", "password_file": "/no/where"}, "No such file"),
        ("a", {"protocol": "ftp"}, "use http or https"),
        ("https://a", {"protocol": "http"}, "the same for every endpoint"),
        ("a", {"protocol": "http", "cacert": "x"}, "need protocol=https"),
        ("a", {"cacert": "/no/where"}, "no such file"),
        ("a", {"protocol": "https", "key": "x"}, "a key without its certificate"),
    ],
)
def test_invalid_configurations(endpoint: str, config: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        etcd_client_from(endpoint, config, environ={})


def test_the_password_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("open sesame\n")
    client = etcd_client_from("a", {"user": "me", "password_file": str(path)}, environ={})
    client.close()
    assert client._members._password == "open sesame"
    assert "sesame" not in repr(client) + str(client._members)
