"""Copies of kept state on the next node: sent by its agent, taken by that node's, fetched by a replacement.

    node k ──saves of its ranks──► node k+1 (the last one: node 0)
    a new node ◄──saves of its ranks── the node that has the newest copy

The agents publish where they can be reached, and what they have, in the store of the round. A node whose rank
has no state here asks the node that has the newest. All of it happens in threads beside the workers:

- A save is complete before it is copied; the worker is not involved and never waits. If it saves again while
  its older save is being copied, that copy is abandoned and the newest is sent instead.
- The newest moment that all ranks and all copies have is held everywhere until a newer one is
  (core/common_saves.py): on the way to that, one save is pinned and copied however long it takes.
- At most one frame is in memory on each side; a copy takes as much memory as the original, and is refused
  where that is not available.
- A copy is valid when all of it has arrived, as every save.
- Bytes are passed on as they are; only a worker unpickles them.
"""

from __future__ import annotations

import json
import os
import select
import threading

from phalanx.agent.state import save_record
from phalanx.agent.state.copy_sender import (
    BALLOT,
    DATA,
    DONE,
    END,
    FETCH,
    HAVE,
    HELLO,
    PINS,
    SAVE,
    CopySender,
    pack_have,
    pack_pins,
    send_save,
    unpack_ballot,
    unpack_pins,
)
from phalanx.agent.state.replica_channel import ERRORS, ReplicaChannel, dial
from phalanx.core.common_saves import CONFIRM, Ballot
from phalanx.errors import PhalanxError
from phalanx.store.net.door import Door
from phalanx.worker.state import memory_limit
from phalanx.worker.state.memory_file import SLOTS, FileLock, MemoryFile, Pins, region_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx.agent.state.holder import RoundNodes
    from phalanx.store.net.peer_handshake import Proven
    from phalanx.store.net.tls import Tls
    from phalanx.store.net.token import Token

_STORE_ERRORS = (PhalanxError, OSError, RuntimeError, ValueError)
_AGAIN = 2.0  # seconds before another attempt to reach the next node
_COPY_SLOTS = 2
_EVERYONE = 30.0  # seconds for the other nodes to publish what they have

Age = tuple[int, int]  # of a save (SlotHeader.age)


class ReplicaSettings:
    """How the agents of a job reach and trust each other."""

    def __init__(self, run_id: str, address: str, token: Token, tls: Tls | None) -> None:
        self.run_id = run_id
        self.address = address
        self.token = token
        self.tls = tls


class Replicas:
    """This node's copies of another node's state, and its own copies elsewhere."""

    def __init__(self, settings: ReplicaSettings) -> None:
        """Listens from now on; OSError if that is not possible."""
        self._settings = settings
        self.note: Callable[[str], None] = lambda _line: None
        self._said: set[str] = set()
        self.copies: dict[int, MemoryFile] = {}  # by global rank
        self._own: list[MemoryFile] = []  # of this node's workers, in this round
        self._lock = threading.Lock()  # of what is above and below
        self._channels: list[ReplicaChannel] = []
        self._number = 0  # the round; a thread of another one ends
        self._ballots: list[tuple[int, Ballot]] = []  # of which round; not looked at yet
        self._closed = False
        self._bell_read, self.bell = os.pipe()
        os.set_blocking(self._bell_read, False)
        os.set_blocking(self.bell, False)
        self._round_end = -1  # a pipe that is closed when the round is over
        self._threads: list[threading.Thread] = []
        self._door = Door(
            settings.address,
            settings.token,
            self._answer,
            tls=settings.tls,
            report=lambda text: self.note(f"kept state: {text}"),
            name="phalanx-state-peer",
        )

    def take(self, rank: int) -> MemoryFile | None:
        """The copy of a rank that is now on this node."""
        with self._lock:
            return self.copies.pop(rank, None)

    def begin_round(
        self, others: RoundNodes, number: int, files: dict[int, MemoryFile], wanted: Sequence[int]
    ) -> None:
        """Workers start in a round: fetch what they lack, then copy what they keep. Does not wait.

        `wanted`: the ranks whose state may be newer on another node; their files are locked meanwhile.
        """
        self.end_round()
        own = {rank: MemoryFile(os.dup(file.fd)) for rank, file in files.items()}
        locks = {}
        for rank in wanted:
            try:
                locks[rank] = FileLock(files[rank], wait=False)
            except BlockingIOError:
                pass  # the end of a copy is still being written to it, which is the newest there is
        over, self._round_end = os.pipe()
        with self._lock:
            self._number, self._own = number, [*own.values()]
        self._start("phalanx-state-round", lambda: self._round(others, number, own, locks, over))

    def end_round(self) -> None:
        """Stop copying; connections of the round are closed."""
        with self._lock:
            self._number = 0
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.stop()
        end, self._round_end = self._round_end, -1
        if end >= 0:
            os.close(end)

    def close(self) -> None:
        """End it; copies are given back when the threads have ended."""
        self._closed = True
        self.end_round()
        self._door.close()

        def end() -> None:
            self._door.join()
            for thread in threads:
                thread.join()  # one may still wait for a store that does not answer: until that is closed
            for file in self.copies.values():
                file.close()
            os.close(self._bell_read)
            os.close(self.bell)

        with self._lock:
            threads = list(self._threads)
        threading.Thread(target=end, name="phalanx-state-end", daemon=True).start()

    # -- one round ----------------------------------------------------------------------------------

    def _round(
        self,
        others: RoundNodes,
        number: int,
        own: dict[int, MemoryFile],
        locks: dict[int, FileLock],
        over: int,
    ) -> None:
        """`over`: readable when the round is."""
        store, node = others.store, others.node
        prefix = f"state/{number}/"
        try:
            store.set(f"{prefix}{node}", json.dumps(self._record([*own.values()])))
            if locks:
                elsewhere = [other for other in range(others.nodes) if other != node]
                self._fetch_all(_records(store, prefix, elsewhere), locks)
        except _STORE_ERRORS as error:
            self._note(f"kept state is not fetched from other nodes: {error}")
        finally:
            for lock in locks.values():
                lock.release()
        try:
            sender = CopySender(own, number, node == 0, lambda: self._take_ballots(number))
            self._copy_on(store, f"{prefix}{(node + 1) % others.nodes}", number, sender, [*own], over)
        except _STORE_ERRORS as error:
            if self._current(number):
                self._note(f"kept state is not copied to the next node: {error}")
        finally:
            with self._lock:
                self._own = [file for file in self._own if file not in own.values()]
            for file in own.values():
                file.close()
            os.close(over)

    def _record(self, own: list[MemoryFile]) -> dict[str, Any]:
        """Where this node can be reached, and the newest that it has of each rank."""
        have: dict[int, Age] = {}
        with self._lock:
            for file in (*own, *self.copies.values()):
                for rank, age in _ages(file).items():
                    have[rank] = max(have.get(rank, (0, 0)), age)
        return {"at": [self._settings.address, self._door.port], "has": have}

    def _fetch_all(self, records: list[dict[str, Any]], locks: dict[int, FileLock]) -> None:
        for rank, lock in locks.items():
            offers = [
                (tuple(one["has"][str(rank)]), tuple(one["at"])) for one in records if str(rank) in one["has"]
            ]
            age, where = max(offers, default=((0, 0), ("", 0)))
            if age > _ages(lock.file).get(rank, (0, 0)):
                try:
                    self._fetch(rank, where, lock.file)
                except ERRORS as error:
                    self._note(f"the kept state of rank {rank} is not fetched from {where[0]}: {error}")

    def _fetch(self, rank: int, where: tuple[str, int], file: MemoryFile) -> None:
        channel = dial(where, self._settings.token, self._settings.tls)
        try:
            channel.send(FETCH, f"{rank} {self._settings.run_id}".encode())
            while True:
                kind, data = channel.receive()
                if kind == DONE:
                    return
                if kind == SAVE:
                    self._take_save(channel, data, file, SLOTS)
                if kind == PINS:
                    name, pins = unpack_pins(data)
                    file.pin(file.number_of(name), pins)
        finally:
            channel.close()

    # -- sending ------------------------------------------------------------------------------------

    def _copy_on(
        self, store: Any, key: str, number: int, sender: CopySender, ranks: list[int], over: int
    ) -> None:
        """Send every save of this round's workers to the next node, until the round is over."""
        where: tuple[str, int] | None = None
        while self._current(number):
            try:
                if where is None:
                    where = _where(_wait_for(store, key))
                channel = dial(where, self._settings.token, self._settings.tls)
            except ERRORS as error:
                self._note(f"kept state is not copied to the next node yet: {error}")
                _wait(over, _AGAIN)
                continue
            if not self._admit(channel, number):
                return
            try:
                hello = f"{number} {self._settings.run_id}\n{','.join(map(str, ranks))}"
                channel.send(HELLO, hello.encode())
                sender.connected(channel)
                while self._current(number):
                    if not sender.send_some(channel):
                        self._sleep(over)
            except ERRORS as error:
                if self._current(number):
                    self._note(f"kept state is not copied to the next node: {error}")
                    _wait(over, _AGAIN)
            finally:
                self._dismiss(channel)

    def _sleep(self, over: int) -> None:
        """Until a worker has saved, or the round is over."""
        poll = select.poll()
        poll.register(self._bell_read, select.POLLIN)
        poll.register(over, select.POLLIN)
        poll.poll()
        try:
            while os.read(self._bell_read, 4096):
                pass
        except BlockingIOError:
            pass

    # -- receiving ----------------------------------------------------------------------------------

    def _answer(self, proven: Proven) -> None:
        channel = ReplicaChannel(proven)
        try:
            kind, data = channel.receive()
            text, _, ranks = data.decode("utf-8", "replace").partition("\n")
            word, _, run_id = text.partition(" ")
            if run_id != self._settings.run_id or not word.isdigit():
                return
            if kind == FETCH:
                self._give(channel, int(word))
            elif kind == HELLO:
                self._take_copies(channel, int(word), {int(rank) for rank in ranks.split(",")})
        except ERRORS as error:
            if not self._closed and not isinstance(error, OSError):
                self._note(f"copies of another node's kept state: {error}")
        finally:
            self._dismiss(channel)

    def _give(self, channel: ReplicaChannel, rank: int) -> None:
        """Send all that this node has of a rank."""
        with self._lock:
            files = [MemoryFile(os.dup(file.fd)) for file in (*self._own, *self.copies.values())]
        try:
            for file in files:
                for name, number in file.names().items():
                    saves = [header for header in reversed(file.slots(number)) if header.rank == rank]
                    for header in saves:
                        send_save(channel, file, name, number, header)
                    if saves:
                        channel.send(PINS, pack_pins(name, file.pins(number)))
            channel.send(DONE)
        finally:
            for file in files:
                file.close()

    def _take_copies(self, channel: ReplicaChannel, number: int, ranks: set[int]) -> None:
        """Keep copies of what another node sends, the state of these ranks, until it ends the connection."""
        if not self._admit(channel, None):
            return
        with self._lock:
            have = pack_have([*self.copies.values()])
        channel.send(HAVE, have)
        while True:
            kind, data = channel.receive(patient=True)
            if kind == BALLOT:
                self._take_ballot(data, number, ranks)
            if kind == SAVE:
                lock = FileLock(self._copy_of(save_record.unpack(data)[1].rank))
                try:
                    self._take_save(
                        channel,
                        data,
                        lock.file,
                        _COPY_SLOTS,
                        lambda part: self._take_ballot(part, number, ranks),
                    )
                finally:
                    lock.release()

    def _take_ballot(self, data: bytes, number: int, ranks: set[int]) -> None:
        """Pin the common saves in the copies of these ranks; the thread that sends takes the ballot."""
        ballot = unpack_ballot(data)
        with self._lock:
            files = [self.copies[rank] for rank in ranks if rank in self.copies]
        found = 0
        for file in files:
            named = file.names().get(ballot.name)
            if named is not None:
                moments = [header.moment for header in file.slots(named)]
                if ballot.settles:
                    pending = ballot.candidate if ballot.phase == CONFIRM else None
                    file.pin(named, Pins(ballot.stays(file.pins(named).common, moments), pending))
                found += ballot.candidate in moments
        if ballot.common is not None:
            # There is a common save of this round: copies of other ranks are of the past.
            with self._lock:
                past = [self.copies.pop(rank) for rank in self.copies.keys() - ranks]
            for copy in past:
                copy.close()  # frees memory, which may take long
        if ballot.phase == CONFIRM and found < len(ranks):
            ballot = ballot.replace(candidate=None)
        with self._lock:
            self._ballots.append((number, ballot))
        try:
            os.write(self.bell, b"!")
        except OSError:
            pass  # full: it is going to look

    def _take_ballots(self, number: int) -> list[Ballot]:
        """Those of a round; those of earlier ones are forgotten."""
        if not self._ballots:
            return []
        with self._lock:
            found = [ballot for of, ballot in self._ballots if of == number]
            self._ballots = [(of, ballot) for of, ballot in self._ballots if of > number]
        return found

    def _copy_of(self, rank: int) -> MemoryFile:
        with self._lock:
            if rank not in self.copies:
                self.copies[rank] = MemoryFile.create()
            return self.copies[rank]

    def _take_save(
        self,
        channel: ReplicaChannel,
        data: bytes,
        file: MemoryFile,
        slots: int,
        on_ballot: Callable[[bytes], None] = lambda _data: None,
    ) -> None:
        """Take in one save; it is valid when its last byte is here. The caller has locked the file."""
        name, header = save_record.unpack(data)
        number, done = file.number_of(name), 0
        room = file.room(number, slots)
        fits = room is not None and not room.is_pinned
        if room is not None and fits:
            header = header.replace(slot=room.slot, region=room.region)
            have = file.sizes(number)[header.region]
            fits = header.used - have <= memory_limit.available()
            if not fits:
                size = f"{header.used / 1e9:.3f} GB"
                self._note(f"no memory for a copy of {size} of the kept state of rank {header.rank}")
            else:
                file.clear(number, room)
                if have < header.used:
                    file.grow(number, header.region, 0, header.used)
        while True:
            kind, part = channel.receive()
            if kind == BALLOT:
                on_ballot(part)
                continue
            if kind != DATA:
                break
            if done + len(part) > header.used:
                raise ValueError("more bytes than announced")
            if fits:
                os.pwrite(file.fd, part, region_at(number, header.region) + done)
            done += len(part)
        if fits and kind == END and done == header.used:
            file.publish(number, header)

    # -- threads ------------------------------------------------------------------------------------

    def _current(self, number: int) -> bool:
        return not self._closed and self._number == number

    def _admit(self, channel: ReplicaChannel, number: int | None) -> bool:
        """Remember a connection, so that the end of the round closes it."""
        with self._lock:
            if not self._closed and number in (None, self._number):
                self._channels.append(channel)
                return True
        channel.close()
        return False

    def _dismiss(self, channel: ReplicaChannel) -> None:
        with self._lock:
            if channel in self._channels:
                self._channels.remove(channel)
        channel.close()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()] + [thread]
            thread.start()

    def _note(self, line: str) -> None:
        if line not in self._said and not self._closed:
            self._said.add(line)
            self.note(line)


def _ages(file: MemoryFile) -> dict[int, Age]:
    """Rank → the age of the newest save of it."""
    found: dict[int, Age] = {}
    for number in file.names().values():
        for header in file.slots(number):
            found[header.rank] = max(found.get(header.rank, (0, 0)), header.age)
    return found


def _wait_for(store: Any, key: str) -> dict[str, Any]:
    from datetime import timedelta

    store.wait([key], timedelta(seconds=_EVERYONE))
    return _checked(store.get(key))


def _records(store: Any, prefix: str, nodes: list[int]) -> list[dict[str, Any]]:
    """What the other nodes have; of those that have not written it in time, nothing."""
    found = []
    for node in nodes:
        try:
            found.append(_wait_for(store, f"{prefix}{node}"))
        except TimeoutError:
            pass
    return found


def _checked(text: bytes) -> dict[str, Any]:
    record = json.loads(text)
    _where(record)
    record["has"] = {str(rank): (int(age[0]), int(age[1])) for rank, age in record["has"].items()}
    return dict(record)


def _where(record: dict[str, Any]) -> tuple[str, int]:
    host, port = record["at"]
    return str(host), int(port)


def _wait(over: int, seconds: float) -> None:
    """A pause before another attempt, which the end of the round ends."""
    poll = select.poll()
    poll.register(over, select.POLLIN)
    poll.poll(seconds * 1000)
