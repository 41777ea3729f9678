"""The store model over one value that can be read, and replaced if it has not changed.

That is all that a third party's rendezvous backend offers (torch's `RendezvousBackend`). The value holds a
whole `store.model`, so the rendezvous runs on it unchanged:

- A request loads the model, is applied, and replaces the value; if another node was faster, it is applied to
  the newer value. The model remembers the answers of each session, so a request whose outcome is not known
  is repeated without a second effect.
- A lease has a counter in the value, which a keep-alive increases. Every client sees on its own clock how
  long the counter has stood still, and ends the lease after its time: clocks are never compared. The counter
  changes after the keep-alive was sent, so no client ends a lease before its owner counts it as over.
- Watches are local: the value is read once per `BLOB_POLL` and after every own change, and what changed since
  the last look is reported, or everything with `reset` where the history in the value does not reach back.

The cost: each node reads the value once per second and writes it at every keep-alive, and the value grows
with the number of nodes, so the traffic grows with its square. A change is seen after up to a second. A dead
process is noticed when its lease runs out, because there is no connection that could end.

What is in the value is decoded as plain data, and nothing else is believed: a value of another form is an
error that names it.
"""

from __future__ import annotations

import os
import queue
import random
import time
from typing import Any, NamedTuple, Protocol, TypedDict, cast

import msgspec

from phalanx.core.rounds.store_commands import (
    Change,
    Command,
    Entry,
    Get,
    KeepAlive,
    Notice,
    Reply,
    Unwatch,
    Watch,
)
from phalanx.errors import StoreConnectionError, StoreError, StoreTimeoutError
from phalanx.job.time_budgets import BLOB_POLL
from phalanx.store.model import Model, mutates
from phalanx.store.net import wire
from phalanx.store.queued_client import CLOSE_TIMEOUT, QueuedClient

MAGIC = b"PHALANX-BLOB-1\n"
_HISTORY, _HISTORY_BYTES = 200, 32 << 10


class CompareAndSetBlob(Protocol):
    """One value, its version (`token`), and a conditional write; torch's `RendezvousBackend`."""

    @property
    def name(self) -> str: ...

    def get_state(self) -> tuple[bytes, Any] | None: ...

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None: ...


class _ModelState(TypedDict):
    """What `Model.dump` returns, as it is checked when it comes back."""

    revision: int
    compacted: int
    next_lease: int
    entries: list[Entry]
    history: list[tuple[Entry, bool]]
    leases: list[tuple[int, float, str]]
    answered: list[tuple[str, int, list[tuple[int, Reply, list[Entry]]]]]


class _Content(NamedTuple):
    """What the value holds: which store it is, the keep-alives of every lease, and the model."""

    store: str
    beats: dict[int, int]
    model: _ModelState


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Content)


class ForeignStateError(StoreError):
    """The value was not written by a client of this kind."""


class BlobClient(QueuedClient):
    """A session with the store in a blob; one thread makes all calls to the backend."""

    def __init__(self, blob: CompareAndSetBlob, *, backoff: float = 0.0, **options: Any) -> None:
        """`options`: those of StoreClient."""
        super().__init__(**options)
        self._blob = blob
        self._backoff = backoff  # seconds, at most, after a write that another node was ahead of
        self._value: bytes | None = None  # as seen last, with its token
        self._token: Any = None
        self._seen_at = self.clock()  # when the value was seen last
        self._alive: dict[int, tuple[int, float]] = {}  # lease -> its counter, and since when it stands there
        self._watching: dict[int, tuple[Watch, int]] = {}  # watch -> the revision up to which it was told

    @property
    def where(self) -> str:
        """The backend, for people."""
        return f"the rendezvous backend {self._blob.name!r}"

    def _abandon_call(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._thread = None  # the backend hangs: nobody waits for it

    # The thread

    def _stay_connected(self) -> None:
        try:
            self._carry_out([], last=False)
            while not self._closing and self.lost is None:
                batch = self._next_batch()
                last = None in batch
                self._carry_out([item for item in batch if item is not None], last)
                if last:
                    return
        except StoreError as error:
            self._give_up(error)

    def _next_batch(self) -> list[tuple[int, Command] | None]:
        """What was asked since the last turn, once something was; nothing if it is only time to look."""
        batch: list[tuple[int, Command] | None] = []
        try:
            batch.append(self._commands.get(timeout=BLOB_POLL))
            while True:
                batch.append(self._commands.get_nowait())
        except queue.Empty:
            return batch

    def _carry_out(self, batch: list[tuple[int, Command]], last: bool) -> None:
        """Apply the commands, all in one write, until that succeeds; then answer and report changes."""
        current = False  # whether the known value is the backend's, as of this turn
        if self.welcome is None or not any(mutates(c) or isinstance(c, KeepAlive) for _, c in batch):
            self._read()
            current = True
        pause, began = self._backoff, self.clock()
        while True:
            now = self.clock()
            content = _decode(self._value, self._blob.name)
            if self.welcome is not None and content.store != self.welcome.store:
                raise StoreConnectionError(f"{self.where} has lost its state, and this job's with it")
            self._look_at_leases(content, now)
            model, beats = _model_of(content, now), dict(content.beats)
            replies, changed = self._apply(model, beats, batch, now)
            changed |= self._expire(content, model, beats, now)
            if last and self.session in model.sessions():
                model.forget(self.session)
                changed = True
            if changed or self._value is None:
                content = _Content(content.store, beats, cast(_ModelState, model.dump()))
                if self._write(content):
                    break
                current, tried = True, self.clock() - began
                if tried >= (CLOSE_TIMEOUT if self._closed.is_set() else self.grace):
                    raise StoreTimeoutError(f"{self.where} has taken no write of this node for {tried:.0f} s")
                time.sleep(pause * random.random())  # others write as well: not in step with them
                pause = max(self._backoff, min(0.2, pause * 2 + 0.01))
            elif current:
                break
            else:
                self._read()
                current = True
        self._look_at_leases(content, now)
        if self.welcome is None:
            self.welcome = wire.Welcome(content.store, durable=True, linger=float("inf"))
            self._came_back()
        self._answer(batch, replies)
        self._report(model)

    def _apply(
        self, model: Model, beats: dict[int, int], batch: list[tuple[int, Command]], now: float
    ) -> tuple[list[Reply], bool]:
        """Carry the commands out; the replies, and whether anything has to be written."""
        replies, changed = [], False
        for number, command in batch:
            if isinstance(command, Unwatch):
                reply = Reply(True, model.revision)
            else:
                reply, _ = model.apply(self.session, number, batch[0][0], command, now)
            if isinstance(command, KeepAlive) and reply.ok:
                beats[command.lease] = beats.get(command.lease, 0) + 1
                changed = True
            # A lease is granted even if its transaction fails.
            changed |= mutates(command) and bool(reply.ok or reply.number)
            replies.append(reply)
        return replies, changed

    def _look_at_leases(self, content: _Content, now: float) -> None:
        """Note since when the counter of each lease stands still, as seen from here."""
        unseen = now - self._seen_at
        before, self._alive = self._alive, {}
        for number, ttl, _ in content.model["leases"]:
            beat = content.beats.get(number, 0)
            known, since = before.get(number, (-1, now))
            # The owner may have been cut off from the backend together with this client.
            counts = known == beat and unseen < max(ttl / 2, 3 * BLOB_POLL)
            self._alive[number] = beat, since if counts else now
        self._seen_at = now

    def _expire(self, content: _Content, model: Model, beats: dict[int, int], now: float) -> bool:
        """End the leases whose counter has stood still for their time."""
        over = False
        for number, ttl, session in content.model["leases"]:
            beat, since = self._alive[number]
            if now - since >= ttl and beats.get(number, 0) == beat:
                over = True
                model.revoke(number)
                if session != self.session:
                    model.forget(session)
        for number in [n for n in beats if n not in self._alive]:
            del beats[number]
        return over

    def _answer(self, batch: list[tuple[int, Command]], replies: list[Reply]) -> None:
        for (number, command), reply in zip(batch, replies, strict=True):
            if isinstance(command, Unwatch):
                self._watching.pop(command.watch, None)
            elif isinstance(command, Watch) and reply.ok:
                told = command.start - 1 if command.start else reply.revision
                self._watching[command.watch] = command, told
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting.answer(reply)

    def _report(self, model: Model) -> None:
        """The changes since each watch was told last."""
        for number, (watch, told) in list(self._watching.items()):
            if told >= model.revision:
                continue
            self._watching[number] = watch, model.revision
            missed = watch._replace(start=told + 1)
            reply, _ = model.apply(self.session, 0, 0, missed, 0.0)
            if reply.ok:
                notice = model.replay(self.session, missed)
            else:
                reply, _ = model.apply(self.session, 0, 0, Get(watch.key, watch.prefix), 0.0)
                changes = tuple(map(Change, reply.entries))
                notice = Notice(number, changes, model.revision, reset=True)
            if notice is not None:
                self._watches.get(number, self.on_notice)(notice)

    # The backend

    def _read(self) -> None:
        """Read the value; without an answer again, until the grace period is over."""
        pause = 0.05
        while True:
            began = self.clock()
            try:
                self._take(self._blob.get_state())
            except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
                self._unanswered(began, error)
                if self._closed.wait(pause):
                    raise StoreConnectionError(f"the connection to {self.where} is closed") from None
                pause = min(1.0, pause * 2)
            else:
                self._came_back()
                return

    def _write(self, content: _Content) -> bool:
        """Replace the value; False: it is not known whether that worked, and what is there now is known."""
        began = self.clock()
        try:
            result = self._blob.set_state(MAGIC + _encoder.encode(content), self._token)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            self._unanswered(began, error)
            result = None
        if result is None:
            self._read()
            return False
        state, token, was_set = result
        self._take((state, token))
        self._came_back()
        return bool(was_set)

    def _take(self, result: tuple[bytes, Any] | None) -> None:
        self._value, self._token = (None, None) if result is None else (bytes(result[0]), result[1])

    def _unanswered(self, began: float, error: Exception) -> None:
        """Raises if the grace period is over."""
        problem = f"{type(error).__name__}: {error}"
        if self._is_away_too_long(began, problem, problem):
            raise StoreConnectionError(
                f"{self.where} has not answered for {self.grace:g} s ({problem}): is its service running?"
            )


def _decode(value: bytes | None, name: str) -> _Content:
    if value is None:
        # Leases of a lost store must not be taken for those of this one.
        model = Model(
            history=_HISTORY,
            history_bytes=_HISTORY_BYTES,
            first_lease=int.from_bytes(os.urandom(5), "big") << 20 | 1,
        )
        return _Content(os.urandom(12).hex(), {}, cast(_ModelState, model.dump()))
    if not value.startswith(MAGIC):
        torchs = value[:1] == b"\x80"
        raise ForeignStateError(
            f"the rendezvous backend {name!r} has a state that another program wrote"
            + (" (a node that runs torchrun with this run id?)" if torchs else f" (it begins {value[:12]!r})")
            + ": start all nodes with phalanx, or use another run id"
        )
    try:
        return _decoder.decode(value[len(MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignStateError(
            f"the state in the rendezvous backend {name!r} cannot be read: {error}"
        ) from None


def _model_of(content: _Content, now: float) -> Model:
    model = Model(history=_HISTORY, history_bytes=_HISTORY_BYTES)
    model.load(cast(dict[str, Any], content.model), now)
    return model
