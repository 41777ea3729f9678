"""The small parts of the elastic rendezvous: settings, who hosts the store, the waiting line, failures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.cluster import waiting_line
from phalanx.cluster.handler import RendezvousParameters
from phalanx.cluster.settings import Settings, open_server
from phalanx.cluster.waiting_line import StatusLine
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.errors import PhalanxError, StoreError, UsageError
from phalanx.job.address import listening_address
from phalanx.store.etcd.client import etcd_client_from
from phalanx.store.net.token import Token
from tests.support.netns import free_port

TOKEN = Token(b"x", "the test")


def settings(endpoint: str = "127.0.0.1:29400", **conf: Any) -> Settings:
    return Settings(RendezvousParameters("phalanx", endpoint, "run", 1, 4, **conf))


def test_torchs_settings_are_understood() -> None:
    options = settings(timeout=30, keep_alive_interval="2", keep_alive_max_attempt="4").options
    assert (options.join_timeout, options.ttl) == (30.0, 8.0)
    options = settings(join_timeout="10m", last_call_timeout="1m30s", ttl=7.5).options
    assert (options.join_timeout, options.last_call, options.ttl) == (600.0, 90.0, 7.5)
    options = settings(join_timeout="5", timeout=30, last_call_timeout=1).options
    assert (options.join_timeout, options.last_call) == (5.0, 1.0)


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"join_timeout": "soon"}, "join_timeout=soon"),
        ({"ttl": "-1"}, "ttl=-1"),
        ({"ttl": "0.5"}, "ttl=0.5s: a lease must outlast linger=1s"),
        ({"timeout": None, "settle": "1x"}, "settle=1x: not a duration; write 30"),
        ({"ttl": "inf"}, "ttl=inf"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(conf: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        settings(**conf)


def test_the_pause_after_a_lost_write_is_a_setting() -> None:
    assert settings(cas_backoff_max_seconds="1.5").cas_backoff == 1.5
    with pytest.raises(ValueError, match="cas_backoff_max_seconds=-1"):  # as torch raises
        settings(cas_backoff_max_seconds=-1)


def test_a_port_that_nobody_can_know_is_refused() -> None:
    with pytest.raises(UsageError, match="not 0"):
        settings("127.0.0.1:0")


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("a:1,b:2", "name one; several are for --rdzv-backend etcd"),
        ("http://a:1", "write host:port, without http://"),
        ("::1", "put an IPv6 address in brackets"),
        ("[::1", "write .address.:port"),
    ],
)
def test_an_endpoint_that_cannot_be_one_is_refused_with_what_to_write(endpoint: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings(endpoint)


def test_etcd_may_have_several_endpoints_written_as_urls() -> None:
    endpoint = "https://[::1]:2379/,https://b:2379/"
    made = Settings(RendezvousParameters("etcd", endpoint, "run", 1, 4))
    assert (made.host, made.port, made.where) == ("::1", 2379, endpoint)
    client = etcd_client_from(endpoint, {"tls_ca": ""})
    assert client.where == "[::1]:2379,b:2379"
    client.close()


def test_the_tls_options_are_etcds_too() -> None:
    with pytest.raises(UsageError, match="need protocol=https"):
        etcd_client_from("a:2379", {"protocol": "http", "tls_ca": "ca.pem"})
    with pytest.raises(PhalanxError, match=r"no-such-file\.pem"):
        etcd_client_from("a:2379", {"tls_ca": "no-such-file.pem"})


def test_a_name_that_is_a_loopback_address_here_is_served_at_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"node0": "127.0.1.1", "node1": "10.0.0.1"}
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (found.get(host, host), 0))]
    )
    assert [listening_address(host) for host in ("node0", "node1", "localhost", "127.0.0.1", "10.0.0.2")] == [
        "0.0.0.0", "node1", "localhost", "127.0.0.1", "10.0.0.2",
    ]  # fmt: skip


def test_a_node_is_known_by_its_rank_its_schedulers_index_and_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = settings(name="n7", rank=3)
    monkeypatch.setenv("SLURM_NODEID", "5")
    info = made.node(2, "trainer")
    monkeypatch.delenv("SLURM_NODEID")
    assert (info.name, info.rank, info.position, info.slots, info.role) == ("n7", 3, 5, 2, "trainer")
    assert info.addr == "127.0.0.1"
    assert settings().node(1, "default").rank == -1
    assert made.node(2, "trainer").id != info.id, "another incarnation is another node"


def test_a_given_address_is_taken_as_it_is() -> None:
    params = RendezvousParameters("phalanx", "127.0.0.1", "run", 1, 4, local_addr="10.9.8.7")
    assert Settings(params).address() == "10.9.8.7"


def test_whoever_can_bind_the_endpoint_hosts_the_store() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    first = open_server(settings(endpoint), TOKEN)
    assert first is not None
    with first:
        assert open_server(settings(endpoint), TOKEN) is None, "it is taken"
        with pytest.raises(StoreError, match="cannot listen"):
            open_server(settings(endpoint, is_host="1"), TOKEN)
    assert open_server(settings("192.0.2.1:29400"), TOKEN) is None, "not an address of ours"
    assert open_server(settings("no-such-host.invalid:29400"), TOKEN) is None
    assert open_server(settings(endpoint, is_host="0"), TOKEN) is None


def test_the_line_counts_down_and_is_shown_at_its_times() -> None:
    line = StatusLine("connecting", 100.0)
    line.learn("1 of 2 nodes here (a), waiting for 1 more, 25 s left", 100.0)
    assert line.words(104.2) == "1 of 2 nodes here (a), waiting for 1 more, 21 s left"
    assert line.words(999.0).endswith(", 0 s left")
    assert line.show_at() == 100.0 + waiting_line.SHOW_AFTER
    line.show(101.0)
    assert line.show_at() == 101.0 + waiting_line.SHOW_EVERY
    line.learn("round 1: 2 nodes running, 1 spare", 104.0)
    assert line.show_at() == 101.0 + waiting_line.SHOW_EVERY, "it has changed"
    line.show(111.0)
    assert line.show_at() is None, "shown once, and again only when something changes"
    line.wait(110.0)
    assert not line.shown
    assert line.show_at() == 110.0 + waiting_line.SHOW_AFTER


def test_the_leader_writes_what_changed_and_goes_on_while_others_wait() -> None:
    line = StatusLine("a", 0.0)
    assert line.write_at(forming=False) == float("-inf")
    assert line.write(1.0) == b"a"
    assert line.write_at(forming=False) is None
    assert line.write_at(forming=True) == 1.0 + waiting_line.WRITE_EVERY
    line.learn("b", 1.1)
    assert line.write_at(forming=False) == 1.0 + waiting_line.WRITE_AFTER


def test_a_failure_travels_and_garbage_is_only_a_summary() -> None:
    failure = NodeFailure("rank 3: exit code 7", "not worth it", "a\nreport", 7)
    assert NodeFailure.read(failure.text()) == failure
    known = NodeFailure("rank 3: KeyError", step=7, signature="KeyError at a.py:3, in f")
    assert NodeFailure.read(known.text()) == known
    older = NodeFailure.read(json.dumps({"summary": "rank 3: KeyError"}))
    assert (older.step, older.signature) == (None, "")
    for bad in ({"step": True}, {"step": "7"}, {"signature": 7}):
        assert not NodeFailure.read(json.dumps({"summary": "x", "signature": "y", **bad})).signature
    assert NodeFailure.read("") == NodeFailure("")
    assert NodeFailure.read("{not json") == NodeFailure("{not json")
    assert len(NodeFailure("x", report="y" * 10_000_000).text()) < 100_000
