"""Which handler a backend's name gives: built in, registered, or a plug-in of an installed package."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from phalanx.cluster.handler import RendezvousHandler, RendezvousParameters, RendezvousStoreInfo
from phalanx.cluster.registry import RendezvousHandlerRegistry, get_rendezvous_handler
from phalanx.cluster.solo import SoloRendezvous
from phalanx.cluster.static import StaticRendezvous
from phalanx.job.address import parse_rendezvous_endpoint


def parameters(backend: str, **settings: object) -> RendezvousParameters:
    return RendezvousParameters(backend, "127.0.0.1:29511", "job", 2, 2, **settings)


def solo(params: RendezvousParameters) -> RendezvousHandler:
    return SoloRendezvous(params.run_id, params.backend)


def install(monkeypatch: pytest.MonkeyPatch, place: Path, group: str, name: str) -> None:
    """A package that offers a backend, as pip would have left it."""
    info = place / "plug_in-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = plug_in_for_tests:offer\n")
    (place / "plug_in_for_tests.py").write_text(
        "from phalanx.cluster.solo import SoloRendezvous\n"
        "def offer():\n    return lambda params: SoloRendezvous(params.run_id, params.backend)\n"
    )
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "plug_in_for_tests", raising=False)


def test_static() -> None:
    handler = get_rendezvous_handler(parameters("static", rank="1", timeout=7))
    assert isinstance(handler, StaticRendezvous)
    assert (handler.rank, handler.world_size, handler.timeout) == (1, 2, 7)
    assert (handler.master_addr, handler.master_port) == ("127.0.0.1", 29511)
    assert (handler.get_backend(), handler.get_run_id()) == ("static", "job")


def test_static_needs_a_rank_and_a_fixed_number() -> None:
    with pytest.raises(ValueError, match="--node-rank"):
        get_rendezvous_handler(parameters("static"))
    with pytest.raises(ValueError, match="2:3"):
        get_rendezvous_handler(RendezvousParameters("static", "h:1", "job", 2, 3, rank=0))
    with pytest.raises(ValueError, match="node rank 2 of 2"):
        get_rendezvous_handler(parameters("static", rank=2))


def test_etcd_v2_is_our_etcd_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert get_rendezvous_handler(parameters("etcd-v2")).get_backend() == "etcd"
    assert caplog.text.count("etcd has removed its v2 API; using etcd") == 1


def test_one_node_may_choose_its_port() -> None:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    info.store.set("key", "value")
    assert info.store.get("key") == b"value"
    assert handler.shutdown()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'nope': no such backend; known are .*phalanx.*static"):
        get_rendezvous_handler(parameters("nope"))


def test_register_and_create() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", solo)
    registry.register("mine", solo)
    assert registry.create_handler(parameters("mine")).get_backend() == "mine"
    with pytest.raises(ValueError, match="registered already"):
        registry.register("mine", lambda params: solo(params))
    with pytest.raises(ValueError, match="empty"):
        registry.register("", solo)


def test_a_handler_for_another_backend_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", lambda params: SoloRendezvous(params.run_id, "other"))
    with pytest.raises(RuntimeError, match=r"'mine'.*'other'"):
        registry.create_handler(parameters("mine"))
    registry.register("c10d", lambda params: SoloRendezvous(params.run_id, "phalanx"))
    assert registry.create_handler(parameters("c10d")).get_backend() == "phalanx"


@pytest.mark.parametrize("group", ["torchrun.handlers", "phalanx.handlers"])
def test_a_plug_in_is_found(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path, group, "plugged")
    handler = get_rendezvous_handler(parameters("plugged"))
    assert (handler.get_backend(), handler.get_run_id()) == ("plugged", "job")
    with pytest.raises(ValueError, match="plugged"):
        get_rendezvous_handler(parameters("nope"))


@pytest.mark.parametrize(
    ("endpoint", "where"),
    [
        ("", ("localhost", 7)),
        (" host ", ("host", 7)),
        ("host:1", ("host", 1)),
        ("[::1]", ("::1", 7)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("bücher.example:1", ("bücher.example", 1)),
    ],
)
def test_endpoints(endpoint: str, where: tuple[str, int]) -> None:
    assert parse_rendezvous_endpoint(endpoint, 7) == where


@pytest.mark.parametrize(
    "endpoint",
    [
        "[::1]:",
        "host:",
        "ht tp:1",
        "a\tb",
        "host\x00:1",
        "host/path:1",
        "[::1:1",
        "[a]b]:1",
        ":1",
        "[ ]:1",
        "a:b",
    ],
)
def test_an_endpoint_that_is_none_is_refused_with_its_value(endpoint: str) -> None:
    with pytest.raises(ValueError, match="rendezvous endpoint") as refused:
        parse_rendezvous_endpoint(endpoint, 7)
    assert repr(endpoint) in str(refused.value)


class Shared(dict[str, bytes]):
    """As much of a store as `build` needs."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


@pytest.mark.parametrize("port", [0, None])
def test_where_to_meet_is_told_with_a_port_that_can_be_connected_to(port: int | None) -> None:
    store = Shared()
    told = RendezvousStoreInfo.build(0, store, "host", port)
    assert 0 < told.master_port < 65536
    assert RendezvousStoreInfo.build(1, store, "elsewhere") == told
    assert RendezvousStoreInfo.build(0, store, "host", 5).master_port == 5


def test_where_to_meet_is_a_dataclass_for_those_who_know_it_from_torch() -> None:
    where = RendezvousStoreInfo("host", 5)
    assert [field.name for field in dataclasses.fields(where)] == ["master_addr", "master_port"]
    assert dataclasses.asdict(where) == {"master_addr": "host", "master_port": 5}
    assert dataclasses.replace(where, master_port=6) == RendezvousStoreInfo("host", 6)
