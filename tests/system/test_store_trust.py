"""The store among others who can write to its network, its port, its token file or its journal."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import threading
from pathlib import Path

import pytest

from phalanx.core.rounds.store_commands import Change, Delete, Entry, Grant, Notice, Put
from phalanx.errors import StoreAuthError, StoreError
from phalanx.store.client import State
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.journal import Journal
from phalanx.store.embedded.server import Server
from phalanx.store.model import Model
from phalanx.store.net import wire
from phalanx.store.net.token import Token, find_token
from tests.conftest import HUNG
from tests.system.hostile_user import NOBODY, as_root
from tests.system.test_store_server import TOKEN, Process, Proxy, Rude, closes

# Frames


@pytest.mark.parametrize("what", ["injected", "repeated", "changed", "left out"])
def test_a_frame_that_the_client_did_not_send_is_not_carried_out(what: str) -> None:
    with Server(token=TOKEN) as server, Client(*server.address, token=TOKEN) as witness:
        incidents: queue.Queue[str] = queue.Queue()
        server.on_incident = incidents.put
        with Rude(server.address) as rude:
            rude.send(wire.encode(0, 0, wire.Hello("s")))
            put = wire.encode(1, 1, Put("mine", b"1"))
            evil = wire.encode(2, 1, Put("evil", b"1"))
            if what == "injected":
                rude.sock.sendall(evil + os.urandom(wire.TAG))
            elif what == "repeated":
                sealed = rude.seal.sealed(wire.encode(1, 1, Delete("evil")))
                rude.sock.sendall(sealed)
                answers = 0
                while answers < 2:  # the welcome, and the first one
                    answers += len(rude.frames.feed(rude.sock.recv(65536)))
                witness.put("evil", b"0")
                rude.sock.sendall(sealed)
            elif what == "changed":
                rude.sock.sendall(rude.seal.sealed(put).replace(b"mine", b"evil"))
            else:
                rude.seal.sealed(put)
                rude.send(evil)
            assert closes(rude.sock)
        assert "its tag is wrong" in incidents.get(timeout=HUNG)
        entry = witness.get("evil")
        if what == "repeated":
            assert entry is not None
        else:
            assert entry is None


def test_a_frame_that_the_server_did_not_send_is_not_believed() -> None:
    """Injected behind the handshake, on the way: it costs the connection, and no answer is wrong."""
    states: queue.Queue[State] = queue.Queue()
    seen: queue.Queue[bytes] = queue.Queue()
    with (
        Server(token=TOKEN) as server,
        Proxy(server.address) as way,
        Client(*way.address, token=TOKEN, on_state=states.put) as client,
    ):
        client.watch("k", lambda notice: [seen.put(c.entry.value) for c in notice.changes])
        assert states.get(timeout=HUNG).what == "connected"
        forged = Notice(1_000_001, (Change(Entry("k", b"forged", 1, 99, 0), False),), 99)
        way.links[0].sendall(wire.encode(0, 0, forged) + bytes(wire.TAG))
        assert states.get(timeout=HUNG).what == "disconnected"
        assert states.get(timeout=HUNG).what == "connected"
        client.put("k", b"real")
        assert seen.get(timeout=HUNG) == b"real"


def test_another_version_is_named() -> None:
    with pytest.raises(wire.WireError, match="install the same version on all nodes"):
        wire.read_greeting(b"PHALANX1" + bytes(wire.NONCE))


# The token


def test_a_guess_at_a_short_token_is_slow_and_a_long_one_is_free() -> None:
    short, long = Token(b"secret", ""), Token(b"5" * 64, "")
    assert short.key != long.key
    assert short.secret not in short.key
    assert short.key is short.key, "computed once"
    import hashlib

    assert short.key == hashlib.scrypt(
        b"secret", salt=b"phalanx store token", n=1 << 15, r=8, p=1, maxmem=64 << 20, dklen=32
    )


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o620, 0o602])
def test_a_token_file_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("5" * 64)
    path.chmod(0o644)  # readable by others: a decision of whoever gave the file
    assert find_token({"PHALANX_TOKEN_FILE": str(path)}).secret == b"5" * 64
    path.chmod(mode)
    with pytest.raises(StoreAuthError, match="can be written by others"):
        find_token({"PHALANX_TOKEN_FILE": str(path)})


@as_root
@pytest.mark.parametrize("what", ["file", "directory", "link to a file"])
def test_a_token_file_of_another_user_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "there" / "token"
    path.parent.mkdir()
    path.write_text("5" * 64)
    path.chmod(0o600)
    given = path
    if what == "directory":
        os.chown(path.parent, NOBODY, NOBODY)
    else:
        os.chown(path, NOBODY, NOBODY)
    if what == "link to a file":
        given = tmp_path / "link"
        given.symlink_to(path)
    with pytest.raises(StoreAuthError, match="belongs to another user"):
        find_token({"PHALANX_TOKEN_FILE": str(given)})


def test_a_mounted_secret_is_read_through_its_links(tmp_path: Path) -> None:
    """As Kubernetes lays it out."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "token").write_text("5" * 64)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "token").symlink_to("..data/token")
    assert find_token({"PHALANX_TOKEN_FILE": str(tmp_path / "token")}).secret == b"5" * 64


@as_root
def test_a_home_that_others_can_write_gets_no_token(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StoreAuthError, match="can be written by others"):
        find_token({"HOME": str(tmp_path)})


# The port


class Impostor:
    """Another user's server at the store's port: takes the greeting and the proof, and refuses."""

    def __init__(self, port: int, answer: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.answer = answer
        self.asked = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            with sock:
                try:
                    sock.settimeout(HUNG)
                    sock.sendall(wire.greeting(os.urandom(wire.NONCE)))
                    sock.recv(wire.GREETING + wire.PROOF, socket.MSG_WAITALL)
                    sock.sendall(self.answer)
                except OSError:
                    pass
            self.asked.release()

    def end(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join(HUNG)
        self.listener.close()


@pytest.mark.parametrize("answer", [wire.REFUSED, wire.OPEN, b"x" * wire.PROOF])
def test_a_refusal_while_the_store_restarts_is_outlived(answer: bytes, tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    process = Process(journal=journal)
    try:
        with Client("127.0.0.1", process.port, token=TOKEN, grace=HUNG) as client:
            client.put("k", b"v")
            process.kill()
            impostor = Impostor(process.port, answer)
            for _ in range(3):
                assert impostor.asked.acquire(timeout=HUNG)
            impostor.end()
            process = Process(process.port, journal)
            entry = client.get("k")
            assert entry is not None
            assert client.lost is None
    finally:
        process.kill()


def test_a_refusal_for_longer_than_the_grace_is_told_as_one(tmp_path: Path) -> None:
    process = Process(journal=str(tmp_path / "journal"))
    with Client("127.0.0.1", process.port, token=TOKEN, grace=1.0) as client:
        process.kill()
        impostor = Impostor(process.port, wire.REFUSED)
        try:
            with pytest.raises(StoreAuthError, match="refused our token"):
                client.request(Put("k", b"v"), HUNG)
        finally:
            impostor.end()


# The journal


def copy_of(journal: Path, to: Path) -> None:
    """A consistent copy, of a store that is gone."""
    for suffix in ("", "-wal", "-shm"):
        source = Path(f"{journal}{suffix}")
        target = Path(f"{to}{suffix}")
        target.unlink(missing_ok=True)
        if source.exists():
            shutil.copy(source, target)


def until(states: queue.Queue[State], what: str) -> State:
    while (state := states.get(timeout=HUNG)).what != what:
        pass
    return state


@pytest.mark.parametrize("restarts_between", [0, 1])
def test_a_journal_that_went_back_begins_a_new_epoch(tmp_path: Path, restarts_between: int) -> None:
    """All clients hear of it: the one that saw the lost changes, and one that did not."""
    journal, old = tmp_path / "journal", tmp_path / "old"
    process = Process(journal=str(journal))
    states: queue.Queue[State] = queue.Queue()
    others: queue.Queue[State] = queue.Queue()
    seen: queue.Queue[tuple[bool, list[bytes]]] = queue.Queue()
    try:
        with (
            Client("127.0.0.1", process.port, token=TOKEN, on_state=others.put) as other,
            Client("127.0.0.1", process.port, token=TOKEN, on_state=states.put) as client,
        ):
            client.put("k", b"old")
            first = client.welcome
            assert first is not None
            process.kill()
            copy_of(journal, old)
            for _ in range(1 + restarts_between):
                process = Process(process.port, str(journal))
                client.watch("k", lambda n: seen.put((n.reset, [c.entry.value for c in n.changes])))
                client.put("k", b"new")
                last = client.request(Grant(30.0)).number
                process.kill()
            copy_of(old, journal)
            process = Process(process.port, str(journal))
            assert "lost changes" in until(states, "reset").why
            until(others, "reset")
            entry = client.get("k")
            assert entry is not None
            assert entry.value == b"old"
            assert other.get("k") == entry
            for one in (client, other):
                assert one.welcome is not None
                assert (one.welcome.store, one.welcome.epoch) == (first.store, 2)
                assert one.welcome.revision > first.revision + 1000, "revisions never repeat"
            assert client.request(Grant(30.0)).number != last, "nor do lease numbers"
            while seen.get(timeout=HUNG) != (True, [b"old"]):
                pass
            # Once: the next restart of a sound journal is nothing special.
            process.kill()
            process = Process(process.port, str(journal))
            client.put("k", b"newest")
            assert client.welcome is not None
            assert client.welcome.epoch == 2
    finally:
        process.kill()


def test_what_several_lost_incarnations_had_is_one_epoch(tmp_path: Path) -> None:
    """Clients that saw different servers, none of which the journal knows, make the others re-form once."""
    journal, model = Journal(str(tmp_path / "journal")), Model()
    try:
        store = journal.load(model, "store", 0.0)
        assert journal.has_lost("one", 5)
        journal.begin_epoch(model, store, "one")
        assert not journal.has_lost("another", 7)
        assert journal.epoch == 2
    finally:
        journal.close()


def test_a_sound_journal_keeps_its_epoch_over_restarts(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    process = Process(journal=journal)
    states: queue.Queue[State] = queue.Queue()
    try:
        with Client("127.0.0.1", process.port, token=TOKEN, on_state=states.put) as client:
            for number in range(4):
                client.put("k", b"%d" % number)
                process.kill()
                process = Process(process.port, journal)
            client.put("k", b"end")
            assert client.welcome is not None
            assert client.welcome.epoch == 1
        assert "reset" not in {state.what for state in states.queue}
    finally:
        process.kill()


def test_answers_wait_for_the_disk(tmp_path: Path) -> None:
    with Server(token=TOKEN, journal=str(tmp_path / "journal")) as server:
        assert server._journal is not None
        assert server._journal._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert server._journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_damaged_journal_is_refused_in_one_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Server(token=TOKEN, journal=str(journal)) as server, Client(*server.address, token=TOKEN) as client:
        for number in range(100):
            client.put(f"k{number}", bytes(1000))
    size = journal.stat().st_size
    with open(journal, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises(StoreError, match=r"^journal .*") as caught:
        Server(token=TOKEN, journal=str(journal))
    assert "\n" not in str(caught.value)
    assert journal.stat().st_mode & 0o077 == 0
