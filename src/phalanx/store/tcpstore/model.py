"""What torch's TCPStore requests do: a map, queues, waits and barriers. Pure: no sockets, threads or clocks.

`step(conn, request)` returns the replies it causes, for this connection and for others that were waiting, in
the order in which they are to be sent. Connections are only numbers here.

Invariants:
- A connection has at most one wait or barrier outstanding (torch's client sends one request at a time, so a
  second one is an error; without this rule a peer could pile up waits without end).
- A wait is over when each of its keys has been there at some moment since it began, as torch's server has it:
  a key that was deleted again before the last one came does not hold it up.
- A key with a waiter registered under it has no value; a queue of that name is empty, or as many others as it
  has entries were told of them and have not popped yet.
- A queue wakes one waiter for one push, and the entry is kept for the one that was woken: torch's client
  waits and then pops, in two requests, and takes an empty queue in the second for an error. If it goes away,
  or sends another request, before it popped, the wake-up passes to the next, so that no waiter sleeps next
  to a full queue. (torch's server keeps nothing, and a third client may come in between.)
- An arrival at a barrier that is cancelled or whose connection is lost is taken back: a client that timed out
  and tries again counts once. (torch's server counts it twice and lets the others pass too early.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from phalanx.store.tcpstore.protocol import (
    ADD,
    APPEND,
    BARRIER,
    CANCEL_WAIT,
    CHECK,
    COMPARE_SET,
    DELETE_KEY,
    GET,
    GETNUMKEYS,
    INT64,
    LIST_KEYS,
    MULTI_GET,
    MULTI_SET,
    PING,
    QUEUE_LEN,
    QUEUE_POP,
    QUEUE_PUSH,
    SET,
    UINT32,
    UINT64,
    WAIT,
    Request,
    TorchProtocolError,
)

READY = b"\x00"
NOT_READY = b"\x01"
CANCELLED = b"\x01"

# One request can name the same large value many times; its reply must not become all of the memory.
MAX_REPLY = 1 << 30
# Everyone who reaches the port may write. Groups keep kilobytes here; a thousand times that is not theirs.
MAX_STORED = 128 << 20
_PER_ENTRY = 200  # bytes that an entry takes besides key and value

Replies: TypeAlias = list[tuple[int, bytes]]

_pack_int = INT64.pack
_pack_size = UINT64.pack


class TorchStoreModel:
    """The state of one round's store, and the effect of each request on it."""

    def __init__(self) -> None:
        # Values grown by APPEND are bytearrays, so that many small appends do not copy the value each time.
        self._values: dict[bytes, bytes | bytearray] = {}
        self._queues: dict[bytes, deque[bytes]] = {}  # never an empty queue
        self._stored = 0  # bytes, of both
        self.operations = 0  # requests carried out
        self._waits: dict[int, set[bytes]] = {}  # connection → keys it still waits for
        self._waiters: dict[bytes, dict[int, None]] = {}  # key → connections, first come first
        self._barriers: dict[bytes, dict[int, int]] = {}  # key → connection → arrivals it waits for
        self._arrived: dict[int, bytes] = {}  # connection → key of the barrier it stands at
        self._entitled = False  # the current request is the pop that an entry was kept for
        self._granted: dict[int, bytes] = {}  # connection → queue it was woken for and has not popped yet
        self._actions: dict[int, Callable[[int, list[Any]], Replies]] = {
            SET: self._set,
            COMPARE_SET: self._compare_set,
            GET: self._get,
            ADD: self._add,
            CHECK: self._check,
            WAIT: self._wait,
            GETNUMKEYS: self._num_keys,
            DELETE_KEY: self._delete,
            APPEND: self._append,
            MULTI_GET: self._multi_get,
            MULTI_SET: self._multi_set,
            CANCEL_WAIT: self._cancel,
            PING: self._ping,
            QUEUE_PUSH: self._queue_push,
            QUEUE_POP: self._queue_pop,
            QUEUE_LEN: self._queue_len,
            LIST_KEYS: self._list_keys,
            BARRIER: self._barrier,
        }

    def step(self, conn: int, request: Request) -> Replies:
        """Carry out one request; raises `TorchProtocolError` when its connection is to be closed for it."""
        op, args = request
        self.operations += 1
        if self._granted and conn in self._granted:
            handed_on = self._use_grant(conn, op, args)
            try:
                return handed_on + self._actions[op](conn, args)
            finally:
                self._entitled = False
        return self._actions[op](conn, args)

    def drop(self, conn: int) -> Replies:
        """Forget a connection that is gone; the replies are for others."""
        self._withdraw(conn)
        key = self._granted.pop(conn, None)
        return [] if key is None else self._wake_one(key)

    # -- values ----------------------------------------------------------------------------------------

    def _set(self, conn: int, args: list[Any]) -> Replies:
        key, value = args
        self._keep(key, value)
        return self._written(key)

    def _get(self, conn: int, args: list[Any]) -> Replies:
        value = self._values.get(args[0], b"")
        return [(conn, _pack_size(len(value)) + value)]

    def _add(self, conn: int, args: list[Any]) -> Replies:
        key, delta = args
        total = _wrap(self._number(key) + delta)
        self._keep(key, b"%d" % total)
        reply = (conn, _pack_int(total))
        woken = self._written(key)
        return [reply, *woken] if woken else [reply]

    def _append(self, conn: int, args: list[Any]) -> Replies:
        key, value = args
        old = self._values.get(key)
        if isinstance(old, bytearray):
            self._take_room(len(value))
            old += value
        else:
            self._keep(key, value if old is None else bytearray(old) + value)
        return self._written(key)

    def _compare_set(self, conn: int, args: list[Any]) -> Replies:
        key, expected, desired = args
        current = self._values.get(key)
        if current is None and expected:
            return [(conn, _pack_size(len(expected)) + expected)]
        if current is None or current == expected:
            self._keep(key, desired)
            return [(conn, _pack_size(len(desired)) + desired), *self._written(key)]
        return [(conn, _pack_size(len(current)) + current)]

    def _multi_get(self, conn: int, args: list[Any]) -> Replies:
        found = [self._values.get(key, b"") for key in args]
        size = sum(map(len, found)) + 8 * len(found)
        if size > MAX_REPLY:
            raise TorchProtocolError(
                f"MULTI_GET of {len(found)} keys would be answered with {size} bytes: "
                f"at most {MAX_REPLY}; ask for fewer keys at a time"
            )
        return [(conn, b"".join([part for value in found for part in (_pack_size(len(value)), value)]))]

    def _multi_set(self, conn: int, args: list[Any]) -> Replies:
        replies: Replies = []
        for i in range(0, len(args), 2):
            self._keep(args[i], args[i + 1])
            replies += self._written(args[i])
        return replies

    def _delete(self, conn: int, args: list[Any]) -> Replies:
        return [(conn, _pack_int(self._discard(args[0])))]

    def _keep(self, key: bytes, value: bytes | bytearray) -> None:
        old = self._values.get(key)
        grows = len(value) - len(old) if old is not None else len(value) + len(key) + _PER_ENTRY
        self._take_room(grows)
        self._values[key] = value

    def _discard(self, key: bytes) -> bool:
        old = self._values.pop(key, None)
        if old is None:
            return False
        self._stored -= len(old) + len(key) + _PER_ENTRY
        return True

    def _take_room(self, size: int) -> None:
        if size > 0 and self._stored + size > MAX_STORED:
            raise TorchProtocolError(
                f"the store is full: {self._stored} bytes, at most {MAX_STORED}; keep large data in files"
            )
        self._stored += size

    def _num_keys(self, conn: int, args: list[Any]) -> Replies:
        return [(conn, _pack_int(len(self._values)))]

    def _list_keys(self, conn: int, args: list[Any]) -> Replies:
        parts = [_pack_int(len(self._values))]
        for key in self._values:
            parts += (_pack_size(len(key)), key)
        return [(conn, b"".join(parts))]

    def _ping(self, conn: int, args: list[Any]) -> Replies:
        return [(conn, UINT32.pack(args[0]))]

    # -- queues ----------------------------------------------------------------------------------------

    def _queue_push(self, conn: int, args: list[Any]) -> Replies:
        key, value = args
        self._take_room(len(key) + len(value) + _PER_ENTRY)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(value)
        return self._wake_one(key)

    def _queue_pop(self, conn: int, args: list[Any]) -> Replies:
        key = args[0]
        queue = self._queues.get(key)
        if queue is None or (not self._entitled and len(queue) <= self._kept(key)):
            return [(conn, _pack_int(0))]
        length = len(queue)
        value = queue.popleft()
        self._stored -= len(key) + len(value) + _PER_ENTRY
        if not queue:
            del self._queues[key]
        return [(conn, _pack_int(length) + _pack_size(len(value)) + value)]

    def _queue_len(self, conn: int, args: list[Any]) -> Replies:
        return [(conn, _pack_int(len(self._queues.get(args[0], ()))))]

    def _wake_one(self, key: bytes) -> Replies:
        """Tell the waiters of a queue that it holds something, up to the first whose wait that completes."""
        waiters = self._waiters.get(key)
        if waiters is None or key not in self._queues:
            return []
        for conn in list(waiters):
            del waiters[conn]
            if not waiters:
                del self._waiters[key]
            missing = self._waits[conn]
            missing.discard(key)
            if not missing:
                del self._waits[conn]
                self._granted[conn] = key
                return [(conn, READY)]
        return []

    def _use_grant(self, conn: int, op: int, args: list[Any]) -> Replies:
        """The next request after a queue's wake-up: the pop it was for, or the turn passes on."""
        key = self._granted.pop(conn)
        if op == QUEUE_POP and args[0] == key:
            self._entitled = True
            return []
        return self._wake_one(key)

    def _kept(self, key: bytes) -> int:
        """How many entries of a queue are kept for connections that were woken for them."""
        return sum(kept == key for kept in self._granted.values())

    # -- waits and barriers ----------------------------------------------------------------------------

    def _check(self, conn: int, args: list[Any]) -> Replies:
        return [(conn, NOT_READY if self._missing(args) else READY)]

    def _wait(self, conn: int, args: list[Any]) -> Replies:
        missing = self._missing(args)
        if len(args) == 1 and args[0] in self._queues and args[0] not in self._values:
            if len(self._queues[args[0]]) > self._kept(args[0]):
                self._granted[conn] = args[0]
            else:
                missing = set(args)  # all entries are kept for others
        if not missing:
            return [(conn, READY)]
        self._refuse_second(conn)
        self._waits[conn] = missing
        for key in missing:
            self._waiters.setdefault(key, {})[conn] = None
        return []

    def _cancel(self, conn: int, args: list[Any]) -> Replies:
        self._withdraw(conn)
        return [(conn, CANCELLED)]

    def _barrier(self, conn: int, args: list[Any]) -> Replies:
        key, world = args
        self._refuse_second(conn)
        count = _wrap(self._number(key) + 1)
        self._keep(key, b"%d" % count)
        woken = self._written(key)
        if count >= world:
            return [(conn, READY), *woken]
        self._barriers.setdefault(key, {})[conn] = world
        self._arrived[conn] = key
        return woken

    def _missing(self, keys: list[bytes]) -> set[bytes]:
        values, queues = self._values, self._queues
        return {key for key in keys if key not in values and key not in queues}

    def _refuse_second(self, conn: int) -> None:
        if conn in self._waits or conn in self._arrived:
            raise TorchProtocolError(
                "a second wait on one connection while the first is pending: cancel that one"
            )

    def _written(self, key: bytes) -> Replies:
        """The replies that become due because `key` has a value now, or a new one."""
        if key not in self._waiters and key not in self._barriers:
            return []
        replies: Replies = []
        for conn in self._waiters.pop(key, ()):
            missing = self._waits[conn]
            missing.discard(key)
            if not missing:
                del self._waits[conn]
                replies.append((conn, READY))
        if key in self._barriers:
            replies += self._released(key)
        return replies

    def _released(self, key: bytes) -> Replies:
        """Let those pass at a barrier who have waited for no more arrivals than there are now."""
        try:
            count = self._number(key)
        except TorchProtocolError:  # the count was overwritten: closed until it is a number again
            return []
        standing = self._barriers[key]
        passed = [conn for conn, world in standing.items() if world <= count]
        for conn in passed:
            del standing[conn], self._arrived[conn]
        if not standing:
            del self._barriers[key]
        return [(conn, READY) for conn in passed]

    def _withdraw(self, conn: int) -> None:
        """Take back the wait or the arrival that this connection has outstanding, if any."""
        for key in self._waits.pop(conn, ()):
            waiters = self._waiters[key]
            del waiters[conn]
            if not waiters:
                del self._waiters[key]
        barrier = self._arrived.pop(conn, None)
        if barrier is None:
            return
        standing = self._barriers[barrier]
        del standing[conn]
        if not standing:
            del self._barriers[barrier]
        try:
            count = self._number(barrier) - 1
        except TorchProtocolError:  # overwritten by a client; its value stays
            return
        if count > 0:
            self._keep(barrier, b"%d" % count)
        else:
            self._discard(barrier)

    def _number(self, key: bytes) -> int:
        """The number stored under `key`, 0 when it is not there; read as C does: blanks, a sign, digits."""
        value = self._values.get(key)
        if value is None:
            return 0
        if len(value) <= 18 and value.isdigit():
            return int(value)
        text = value.lstrip(b" \t\n\v\f\r")
        sign = text[:1] in (b"-", b"+")
        digits = text[sign:]
        stop = len(digits) - len(digits.lstrip(b"0123456789"))
        significant = digits[:stop].lstrip(b"0")
        if stop and len(significant) <= 19:
            number = int(significant or b"0")
            number = -number if text[:1] == b"-" else number
            if number == _wrap(number):
                return number
        raise TorchProtocolError(
            f"{bytes(key[:80])!r} holds {bytes(value[:40])!r}, no 64-bit number: it cannot be counted up"
        )


def _wrap(number: int) -> int:
    """Into the range of int64, wrapping around as the sum does in torch's server."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
