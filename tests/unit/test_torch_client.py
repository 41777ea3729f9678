"""The client of torch's TCPStore protocol, against our server; and side by side with torch's own client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from phalanx.errors import StoreConnectionError, StoreTimeoutError
from phalanx.store.tcpstore.client import TorchStoreClient
from phalanx.store.tcpstore.server import TorchStoreServer
from tests.conftest import HUNG


@pytest.fixture
def server() -> Iterator[TorchStoreServer]:
    with TorchStoreServer() as made:
        yield made


@pytest.fixture
def client(server: TorchStoreServer) -> Iterator[TorchStoreClient]:
    with TorchStoreClient("127.0.0.1", server.port, HUNG) as made:
        yield made


def test_every_method(client: TorchStoreClient) -> None:
    client.set("a", "text")
    client.set("b", b"\0bytes")
    assert (client.get("a"), client.get("b")) == (b"text", b"\0bytes")
    assert client.add("n", 3) == 3
    assert client.add("n", -1) == 2
    assert client.check(["a", "b"])
    assert not client.check(["a", "nope"])
    client.append("a", "+")
    assert client.get("a") == b"text+"
    assert client.compare_set("c", "", "first") == b"first"
    assert client.compare_set("c", "other", "second") == b"first"
    assert client.compare_set("c", "first", "second") == b"second"
    client.multi_set(["x", "y"], ["1", b"2"])
    assert client.multi_get(["y", "x"]) == [b"2", b"1"]
    assert client.num_keys() == 6
    assert client.delete_key("x")
    assert not client.delete_key("x")
    with pytest.raises(ValueError, match="1 keys and 2 values"):
        client.multi_set(["x"], ["1", "2"])


def test_a_value_of_eight_mebibytes_passes(client: TorchStoreClient) -> None:
    value = bytes(range(256)) * (8 * 1024 * 1024 // 256)
    client.set("big", value)
    assert client.get("big") == value


def test_a_wait_is_answered_by_another_client(server: TorchStoreServer, client: TorchStoreClient) -> None:
    with TorchStoreClient("127.0.0.1", server.port, HUNG) as other:
        got: list[bytes] = []
        waiter = threading.Thread(target=lambda: got.append(other.get("late")))
        waiter.start()
        client.set("late", "now")
        waiter.join(HUNG)
        assert got == [b"now"]


def test_a_wait_that_runs_out_names_the_key_and_leaves_the_client_usable(client: TorchStoreClient) -> None:
    for limit in (0.01, timedelta(milliseconds=10)):
        with pytest.raises(StoreTimeoutError, match="'missing'"):
            client.wait(["missing"], limit)
    client.set_timeout(timedelta(milliseconds=10))
    assert client.timeout == timedelta(milliseconds=10)
    with pytest.raises(StoreTimeoutError, match="'missing'"):
        client.get("missing")
    client.set_timeout(HUNG)
    client.set("missing", "here")
    assert client.get("missing") == b"here"


def test_close_ends_a_wait_in_another_thread(server: TorchStoreServer) -> None:
    client = TorchStoreClient("127.0.0.1", server.port, HUNG)
    started = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        started.set()
        try:
            client.wait(["never"], None)
        except StoreConnectionError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    started.wait(HUNG)
    client.close()
    waiter.join(HUNG)
    assert len(errors) == 1
    with pytest.raises(StoreConnectionError):
        client.set("a", "1")


def test_a_server_that_is_emptied_drops_its_clients(
    server: TorchStoreServer, client: TorchStoreClient
) -> None:
    server.reset()
    with pytest.raises(StoreConnectionError, match=str(server.port)):
        client.num_keys()


def test_it_waits_for_the_server_to_come() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        made: list[TorchStoreClient] = []
        knocking = threading.Thread(target=lambda: made.append(TorchStoreClient("127.0.0.1", port, HUNG)))
        knocking.start()
        with TorchStoreServer(sock=holder):
            knocking.join(HUNG)
            made[0].set("a", "1")
            made[0].close()


def test_nobody_there_is_an_error_that_names_the_address() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound, not listening: nobody else can take the port meanwhile
        port = holder.getsockname()[1]
        with pytest.raises(StoreConnectionError, match=f"127.0.0.1:{port} within 0.1 s"):
            TorchStoreClient("127.0.0.1", port, 0.1)


def test_a_prefix_goes_in_front_of_every_key(server: TorchStoreServer, client: TorchStoreClient) -> None:
    with TorchStoreClient("127.0.0.1", server.port, HUNG, prefix="p/") as prefixed:
        prefixed.set("a", "1")
        prefixed.multi_set(["b"], ["2"])
        assert client.multi_get(["p/a", "p/b"]) == [b"1", b"2"]
        assert prefixed.check(["a"])
        assert not client.check(["a"])


def test_torchs_client_sees_the_same_keys(server: TorchStoreServer, client: TorchStoreClient) -> None:
    dist = pytest.importorskip("torch.distributed")
    theirs = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    theirs.set("theirs", "1")
    client.set("ours", "2")
    assert client.get("theirs") == b"1"
    assert theirs.get("ours") == b"2"
    assert theirs.add("n", 1) == 1
    assert client.add("n", 1) == 2
    prefixed = dist.PrefixStore("p", theirs)
    prefixed.set("k", "3")
    with TorchStoreClient("127.0.0.1", server.port, HUNG, prefix="p/") as same:
        assert same.get("k") == b"3"
    del prefixed, theirs
