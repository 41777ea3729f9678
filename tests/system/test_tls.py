"""The embedded store inside TLS: it works, and each way to get it wrong says what to do."""

from __future__ import annotations

import queue
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from phalanx.core.rounds.store_commands import Grant, KeepAlive
from phalanx.errors import StoreAuthError, UsageError
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net import wire
from phalanx.store.net.tls import Tls, client_context, own_fingerprint
from phalanx.store.net.token import Token
from tests.conftest import HUNG
from tests.support.store_contract import StoreContract
from tests.system.test_store_server import Proxy

TOKEN = Token(b"test secret", "the test")


def _openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, timeout=HUNG, check=False)
    assert done.returncode == 0, done.stderr


class Authority:
    """A CA of our own, made with the openssl program; everything it signs lies in its directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory = directory
        self.cert, self.key = directory / f"{name}.pem", directory / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-keyout", str(self.key), "-out", str(self.cert)),
        )

    def sign(self, name: str, hosts: str = "DNS:localhost,IP:127.0.0.1") -> Tls:
        """A certificate for `name`, with this CA as the one to trust."""
        request, cert, key = (self.directory / f"{name}.{end}" for end in ("csr", "pem", "key"))
        extra = self.directory / f"{name}.ext"
        extra.write_text(f"subjectAltName={hosts}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.cert), "-CAkey", str(self.key)),
            *("-set_serial", str(abs(hash(name))), "-days", "2", "-extfile", str(extra), "-out", str(cert)),
        )
        return Tls(str(cert), str(key), str(self.cert))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    return authority.sign("node")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Authority(tmp_path_factory.mktemp("foreign"), "foreign").sign("stranger")


@pytest.fixture
def server(tls: Tls) -> Iterator[Server]:
    with Server(token=TOKEN, tls=tls) as running:
        yield running


class TestSealed(StoreContract):
    """The common contract, mutual TLS underneath."""

    @pytest.fixture
    def store(self, server: Server, tls: Tls) -> Iterator[object]:
        from tests.system.test_store_server import OverTcp

        class OverTls(OverTcp):
            def __init__(self, address: tuple[str, int], stack: ExitStack) -> None:
                self._address, self._stack = address, stack
                self._seen = {}
                client = Client(*address, token=TOKEN, tls=tls, on_notice=self._note)
                self._client = stack.enter_context(client)

            def second(self) -> OverTls:
                return OverTls(self._address, self._stack)

        with ExitStack() as stack:
            yield OverTls(server.address, stack)


def test_large_values_and_broken_connections(server: Server, tls: Tls) -> None:
    seen: queue.Queue[bytes] = queue.Queue()
    with (
        Proxy(server.address) as proxy,
        Client(*proxy.address, token=TOKEN, tls=tls) as client,
        Client(*server.address, token=TOKEN, tls=tls) as other,
    ):
        client.watch("k", lambda notice: [seen.put(c.entry.value) for c in notice.changes])
        for number in range(6):
            value = bytes([number]) * (3 << 20)
            other.put("k", value)
            assert seen.get(timeout=HUNG) == value
            proxy.cut()
        lease = client.request(Grant(60.0), HUNG).number
        assert client.request(KeepAlive(lease), HUNG).ok


def test_nothing_readable_crosses_the_wire(server: Server, tls: Tls) -> None:
    class Eavesdropper(Proxy):
        heard = b""

        def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
            try:
                while data := source.recv(65536):
                    self.heard += data
                    sink.sendall(data)
            except OSError:
                pass
            for link in (source, sink):
                try:
                    link.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    with Eavesdropper(server.address) as proxy, Client(*proxy.address, token=TOKEN, tls=tls) as client:
        client.put("a-key-to-find", b"a-value-to-find")
        assert proxy.heard
        for word in (b"to-find", wire.MAGIC, TOKEN.secret):
            assert word not in proxy.heard


def test_without_a_ca_a_certificate_of_any_kind_will_do(foreign: Tls) -> None:
    alone = foreign._replace(ca="")
    with Server(token=TOKEN, tls=alone) as server, Client(*server.address, token=TOKEN, tls=Tls()) as client:
        assert client.put("k", b"v").ok


def test_one_who_stands_between_is_found_out_by_the_token_alone(tls: Tls, foreign: Tls) -> None:
    """He has a certificate but not the token: passing the proofs on does not help him."""
    with Server(token=TOKEN, tls=tls._replace(ca="")) as server:
        outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        outside.load_cert_chain(foreign.cert, foreign.key)
        inside = client_context(Tls())
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def relay() -> None:
                near = outside.wrap_socket(listener.accept()[0], server_side=True)
                far = inside.wrap_socket(socket.create_connection(server.address))
                with near, far:
                    near.sendall(far.recv(wire.GREETING))
                    passed = near.recv(wire.GREETING)
                    while len(passed) < wire.GREETING + wire.PROOF:
                        passed += near.recv(wire.PROOF)
                    far.sendall(passed)
                    near.sendall(far.recv(wire.PROOF))

            thread = threading.Thread(target=relay)
            thread.start()
            victim = Client(*listener.getsockname(), token=TOKEN, tls=Tls())
            with pytest.raises(StoreAuthError, match="refused our token"):
                victim.connect(HUNG)
            victim.close()
            thread.join(HUNG)


def refused(client: Client) -> str:
    with pytest.raises(StoreAuthError) as caught:
        client.connect(HUNG)
    client.close()
    return str(caught.value)


def test_each_mistake_says_what_to_do(server: Server, tls: Tls, foreign: Tls) -> None:
    incidents: queue.Queue[str] = queue.Queue()
    server.on_incident = incidents.put

    def talk(files: Tls | None) -> str:
        return refused(Client(*server.address, token=TOKEN, tls=files))

    assert "wants TLS: give --tls-ca" in talk(None)
    assert "TLS" in incidents.get(timeout=HUNG)
    assert "wants a certificate from us; add --tls-cert" in talk(Tls(ca=tls.ca))
    assert "peer did not return a certificate" in incidents.get(timeout=HUNG)
    assert f"not signed by the CA in {foreign.ca}" in talk(foreign)
    assert "TLS" in incidents.get(timeout=HUNG)
    assert f"does not accept our certificate {foreign.cert}" in talk(foreign._replace(ca=tls.ca))
    assert "TLS" in incidents.get(timeout=HUNG)
    with Client(*server.address, token=TOKEN, tls=tls) as client:
        assert client.put("k", b"still served").ok


def test_a_plain_store_and_a_client_with_tls(tls: Tls) -> None:
    with Server(token=TOKEN) as plain:
        text = refused(Client(*plain.address, token=TOKEN, tls=tls))
    assert "it does not speak TLS; start it with --tls-cert" in text


def test_a_wrong_token_inside_tls_names_where_ours_is_from(server: Server, tls: Tls) -> None:
    wrong = Token(b"other", "the file /home/me/token")
    assert "our token is from the file /home/me/token" in refused(
        Client(*server.address, token=wrong, tls=tls)
    )


def test_a_client_that_stops_in_the_handshake_costs_nothing_and_goes(
    server: Server, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.store.net.connections.HANDSHAKE_TIME", 0.5)
    turns: list[float] = []
    original = server._next_time
    monkeypatch.setattr(server, "_next_time", lambda now: turns.append(now) or original(now))
    with socket.create_connection(server.address) as silent:
        silent.settimeout(HUNG)
        silent.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a TLS hello
        assert silent.recv(100) == b""
    # Half a second of waiting is a handful of turns of the loop; one that spins makes thousands.
    assert len(turns) < 50
    with Client(*server.address, token=TOKEN, tls=tls) as client:
        assert client.put("k", b"v").ok


def test_files_that_will_not_do(tls: Tls, foreign: Tls, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    with pytest.raises(UsageError, match="certificate /no/where: no such file"):
        Server(token=TOKEN, tls=Tls("/no/where", tls.key))
    with pytest.raises(UsageError, match=r"are of no use .*belong together"):
        Server(token=TOKEN, tls=Tls(tls.cert, foreign.key))
    with pytest.raises(UsageError, match="not a file of PEM certificates"):
        Server(token=TOKEN, tls=tls._replace(ca=str(junk)))
    with pytest.raises(UsageError, match="needs a certificate of its own"):
        Server(token=TOKEN, tls=Tls(ca=tls.ca))
    with pytest.raises(UsageError, match="a key without its certificate"):
        Client("localhost", 1, tls=Tls(key=tls.key))
    secret = tmp_path / "secret.key"
    _openssl("ec", "-in", tls.key, "-aes256", "-passout", "pass:word", "-out", str(secret))
    with pytest.raises(UsageError, match="passphrase"):
        Server(token=TOKEN, tls=Tls(tls.cert, str(secret)))


def test_one_file_may_hold_certificate_and_key(tls: Tls, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(tls.key).read_text() + Path(tls.cert).read_text())
    assert own_fingerprint(Tls(str(both))) == own_fingerprint(tls)
    with (
        Server(token=TOKEN, tls=Tls(str(both))) as server,
        Client(*server.address, token=TOKEN, tls=Tls()) as client,
    ):
        assert client.put("k", b"v").ok
