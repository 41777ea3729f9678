"""The store over one compare-and-set value: the common contract, lost answers, absent services, its cost."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from phalanx.core.rounds.store_commands import (
    Add,
    Change,
    Command,
    Get,
    Grant,
    KeepAlive,
    Notice,
    Put,
    Reply,
    Watch,
)
from phalanx.errors import StoreConnectionError, StoreError
from phalanx.store.client import State
from phalanx.store.embedded.blob_client import MAGIC, BlobClient
from tests.conftest import HUNG, wait_until
from tests.support.memory_blob import MemoryBlob
from tests.support.store_contract import StoreContract


class OverBlob:
    """A client with the interface of the contract."""

    def __init__(self, blob: MemoryBlob, stack: ExitStack) -> None:
        self._blob, self._stack = blob, stack
        self._seen: dict[int, queue.Queue[Change]] = {}
        self._client = stack.enter_context(BlobClient(blob, on_notice=self._note))

    def request(self, command: Command) -> Reply:
        if isinstance(command, Watch):
            self._seen[command.watch] = queue.Queue()
        return self._client.request(command, HUNG)

    def _note(self, notice: Notice) -> None:
        for change in notice.changes:
            self._seen[notice.watch].put(change)

    def changes(self, watch: int, count: int) -> list[Change]:
        found = [self._seen[watch].get(timeout=HUNG) for _ in range(count)]
        while not self._seen[watch].empty():
            found.append(self._seen[watch].get())
        return found

    def second(self) -> OverBlob:
        return OverBlob(self._blob, self._stack)


class TestContract(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[OverBlob]:
        with ExitStack() as stack:
            yield OverBlob(MemoryBlob(), stack)


def test_a_write_whose_answer_was_lost_happens_once() -> None:
    blob = MemoryBlob()
    with BlobClient(blob) as client:
        client.request(Put("a", b""), HUNG)
        blob.lose_answers = 2
        assert client.request(Add("n", 1), HUNG).number == 1
        assert client.request(Add("n", 1), HUNG).number == 2


def test_many_clients_write_and_nothing_is_lost() -> None:
    blob = MemoryBlob()
    with ExitStack() as stack:
        clients = [stack.enter_context(BlobClient(blob)) for _ in range(6)]
        answers: queue.Queue[Reply] = queue.Queue()
        for _ in range(10):
            for client in clients:
                client.send(Add("n", 1), answers.put)
        numbers = sorted(answers.get(timeout=HUNG).number for _ in range(60))
        assert numbers == list(range(1, 61))


def test_the_service_is_away_for_a_while() -> None:
    blob = MemoryBlob()
    states: queue.Queue[State] = queue.Queue()
    with BlobClient(blob, on_state=states.put) as client:
        assert states.get(timeout=HUNG).what == "connected"
        blob.broken = True
        state = states.get(timeout=HUNG)
        assert (state.what, state.why) == ("disconnected", "ConnectionError: the service is away")
        blob.broken = False
        assert client.request(Put("a", b"1"), HUNG).ok
        assert states.get(timeout=HUNG).what == "connected"


def test_a_service_that_stays_away_ends_the_session() -> None:
    blob = MemoryBlob()
    with BlobClient(blob, grace=0.3) as client:
        blob.broken = True
        with pytest.raises(StoreConnectionError, match=r"'memory' has not answered for 0.3 s.*is away"):
            client.request(Get("a"), HUNG)


def test_a_value_that_another_program_wrote_is_named() -> None:
    for value, words in (
        (b"\x80\x05torch's", "torchrun with this run id"),
        (b"hello", "it begins b'hello'"),
        (MAGIC + b"\xc1", "cannot be read"),
    ):
        blob = MemoryBlob()
        blob.state, blob.version = value, 1
        client = BlobClient(blob)
        try:
            with pytest.raises(StoreError, match=words):
                client.connect(HUNG)
        finally:
            client.close()
        assert blob.state == value


def test_a_lost_value_ends_the_session() -> None:
    blob = MemoryBlob()
    with BlobClient(blob) as client:
        client.request(Put("a", b"1"), HUNG)
        blob.state, blob.version = None, 0
        with pytest.raises(StoreConnectionError, match="has lost its state"):
            client.request(Get("a"), HUNG)


def test_a_lease_lives_on_through_keep_alives_and_an_absence_of_the_service_and_ends_without() -> None:
    blob, now = MemoryBlob(), [1000.0]
    with BlobClient(blob, clock=lambda: now[0]) as owner, BlobClient(blob, clock=lambda: now[0]) as other:
        lease = owner.request(Grant(10.0), HUNG).number
        owner.request(Put("a", b"1", lease), HUNG)
        assert other.request(Get("a"), HUNG).entries
        for _ in range(5):
            now[0] += 4
            assert owner.request(KeepAlive(lease), HUNG).ok
            assert other.request(Get("a"), HUNG).entries
        blob.broken = True
        now[0] += 30  # nobody could have kept it alive
        blob.broken = False
        assert other.request(Get("a"), HUNG).entries
        assert owner.request(KeepAlive(lease), HUNG).ok
        assert other.request(Get("a"), HUNG).entries
        for _ in range(2):
            now[0] += 4
            assert other.request(Get("a"), HUNG).entries
        now[0] += 4
        wait_until(lambda: not other.request(Get("a"), HUNG).entries, "the end of the lease")
        assert owner.request(KeepAlive(lease), HUNG).error == "lease"


def test_an_idle_client_reads_once_a_second_and_leaves_nothing_behind() -> None:
    blob = MemoryBlob()
    with BlobClient(blob) as client:
        lease = client.request(Grant(30.0), HUNG).number
        client.request(Watch(1, "a", prefix=True), HUNG)
        reads, writes = blob.reads, blob.writes
        began = time.monotonic()
        wait_until(lambda: blob.reads >= reads + 2, "two polls")
        assert time.monotonic() - began > 0.9  # never more than one a second
        assert blob.writes == writes
        assert client.request(KeepAlive(lease), HUNG).ok
    assert blob.state is not None
    assert client.session.encode() not in blob.state.split(b"answered")[1]
