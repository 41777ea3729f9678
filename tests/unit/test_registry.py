"""Which handler a backend's name gives: built in, registered, or a plug-in of an installed package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.errors import RendezvousError
from phalanx.rendezvous.handler import RendezvousHandler, RendezvousParameters
from phalanx.rendezvous.registry import RendezvousHandlerRegistry, get_rendezvous_handler
from phalanx.rendezvous.solo import SoloRendezvous
from phalanx.rendezvous.static import StaticRendezvous


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
        "from phalanx.rendezvous.solo import SoloRendezvous\n"
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


def test_etcd_v2_is_answered_with_what_to_use() -> None:
    with pytest.raises(RendezvousError, match="v2 API is not supported; use etcd"):
        get_rendezvous_handler(parameters("etcd-v2"))


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
