"""The event loop behind the torch store: sockets on one side, the model on the other. One thread uses it.

Invariants:
- Nothing blocks but the selector, and it has no timeout (an idle server uses no CPU) except while accepting
  is paused for want of file descriptors.
- A peer that does not read is not served further until it does: what waits for it is bounded by `_HIGH_WATER`
  plus one reply, and other peers are not affected.
- A peer that breaks the protocol loses its connection, is named in the log, and other peers are not affected.
- Torch's clients send something at once. Connections that have sent nothing are closed, the oldest first,
  when they take more than a quarter of the process's descriptors; a quarter is never used here at all.
- Requests that have arrived in part take at most `MAX_HALF_SENT` bytes in all: then the connection with the
  largest one is closed.
- A connection that is listened to has no replies and no requests waiting.
"""

from __future__ import annotations

import errno
import itertools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from phalanx.store.net.strangers import descriptors
from phalanx.store.net.wake_up import WakeUp
from phalanx.store.tcpstore.model import Replies, TorchStoreModel
from phalanx.store.tcpstore.protocol import Request, RequestParser, TorchProtocolError

_READ = selectors.EVENT_READ
_WRITE = selectors.EVENT_WRITE
_CHUNK = 64 * 1024  # more would make malloc map and unmap pages for every small request
_BIG_CHUNK = 1024 * 1024  # for the middle of a large value
_HIGH_WATER = 1024 * 1024  # output pending for a peer at which its further requests wait
MAX_HALF_SENT = 64 << 20
_ACCEPTS_IN_A_ROW = 64
_SILENT_SHARE = 4  # of the descriptors, for connections that have sent nothing: one part in so many
_ACCEPT_PAUSE = 1.0  # descriptors may be freed elsewhere in the process, without an event
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_MOST_COMPLAINTS = 100  # a port scan must not fill the log

Adopt = Callable[[socket.socket, tuple[Any, ...]], None]


class _Connection:
    """One client: its socket, its half-read request, and what waits until it reads its replies."""

    __slots__ = ("address", "held", "id", "mask", "new", "out", "out_size", "parser", "sock", "todo")

    def __init__(self, number: int, sock: socket.socket, address: tuple[Any, ...]) -> None:
        self.id = number
        self.sock = sock
        self.address = address
        self.new = True  # nothing has been read from it yet
        self.held = 0  # bytes of a request that is not complete
        self.parser = RequestParser()
        self.out: deque[bytes | memoryview] = deque()
        self.out_size = 0
        self.todo: deque[Request] = deque()
        self.mask = _READ


class StoreLoop:
    """Accepts, reads, steps the model and replies, until it is stopped.

    `on_wake` runs when `wake` is readable: the owner of the loop uses it for its calls. Requests may be made
    under negative numbers on behalf of this process; their replies go to `on_reply`. A connection whose first
    byte is one of `foreign` speaks another protocol and is given to `adopt`, unread. `on_client` gets the
    host of each of the others, once.
    """

    def __init__(
        self,
        listener: socket.socket,
        wake: WakeUp,
        *,
        on_wake: Callable[[], None],
        on_reply: Callable[[int, bytes], None],
        log: Callable[[str], None],
        adopt: Adopt | None = None,
        foreign: bytes = b"",
        on_client: Callable[[str], None] = lambda host: None,
    ) -> None:
        self.stopping = False
        self._on_client = on_client
        self._adopt, self._foreign = adopt, foreign
        self._listener = listener
        self._on_reply = on_reply
        self._log = log
        self._complaints: set[str] = set()
        self._model = TorchStoreModel()
        self._connections: dict[int, _Connection] = {}
        self._silent: dict[int, _Connection] = {}  # those that have sent nothing yet, the oldest first
        self._half_sent = 0  # bytes of all requests that are not complete
        self._numbers = itertools.count(1)
        self._accept_again = 0.0  # the moment at which paused accepting is resumed; 0: not paused
        # Accepted sockets inherit these; set on each one they would be half of the system calls of accepting.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, _READ, on_wake)
        self._selector.register(listener, _READ, self._accept)

    def run(self) -> None:
        """Serve until `stopping` is set and the wake socket is written to."""
        select = self._selector.select
        while not self.stopping:
            for key, events in select(self._patience()):
                conn = key.data
                if type(conn) is not _Connection:
                    conn()
                elif conn.id not in self._connections:
                    pass  # closed to make room, in this same batch
                elif events & _WRITE:
                    self._flush(conn)
                else:
                    self._read(conn)

    @property
    def operations(self) -> int:
        """Requests carried out since the last reset."""
        return self._model.operations

    def step(self, number: int, request: Request) -> None:
        """Carry out a request of this process; raises `TorchProtocolError` when it makes no sense."""
        self._deliver(self._model.step(number, request))

    def give_up(self, number: int) -> None:
        """Take back a wait of this process."""
        self._deliver(self._model.drop(number))

    def reset(self) -> None:
        """Drop every connection and every key."""
        # Peers that are connected but not accepted yet belong to the former round too.
        while self._accept() or self._connections:
            for conn in list(self._connections.values()):
                if not (conn.new and self._hand_over(conn)):
                    self._forget(conn)
        self._model = TorchStoreModel()

    def close(self) -> None:
        """Close the connections and the selector; the sockets given to the loop stay with their owner."""
        for conn in self._connections.values():
            conn.sock.close()
        self._connections.clear()
        self._selector.close()

    # -- accepting ---------------------------------------------------------------------------------------

    def _accept(self) -> int:
        """Accept some, so that many new connections do not hold up existing ones; returns the number."""
        accepted = 0
        for _ in range(_ACCEPTS_IN_A_ROW):
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._pause_accepting(error)
                    break
                continue  # a network error of that one peer
            sock.setblocking(False)
            conn = _Connection(next(self._numbers), sock, peer)
            self._connections[conn.id] = conn
            self._silent[conn.id] = conn
            self._selector.register(sock, _READ, conn)
            accepted += 1
        if accepted:
            self._make_room()
        return accepted

    def _make_room(self) -> None:
        """Close connections that nobody needs before the process has no descriptors left for its own use."""
        limit = descriptors()
        while len(self._silent) > limit // _SILENT_SHARE:
            self._close_silent(next(iter(self._silent.values())))
        while len(self._connections) > limit - limit // 4:
            if self._silent:
                self._close_silent(next(iter(self._silent.values())))
            else:  # the newest: what is in use stays
                newest = next(reversed(self._connections.values()))
                self._complain(
                    "torch store: too many connections: raise the limit of open files (ulimit -n); those "
                    "that are connected are served on"
                )
                self._drop(newest)

    def _close_silent(self, conn: _Connection) -> None:
        if self._hand_over(conn):
            return
        try:
            waiting = conn.sock.recv(1, socket.MSG_PEEK)
        except OSError:
            waiting = b""
        if waiting:  # it has sent something, which the loop has not come to read yet
            self._silent.pop(conn.id, None)
            return
        self._complain("torch store: closed idle connections, to keep descriptors for the job")
        self._drop(conn)

    def _pause_accepting(self, error: OSError) -> None:
        # The listener would stay readable, and the loop would spin on it.
        if not self._accept_again:
            self._selector.unregister(self._listener)
        self._accept_again = time.monotonic() + _ACCEPT_PAUSE
        self._complain(
            f"torch store: new connections have to wait ({error.strerror}): raise the limit of open files "
            "(ulimit -n); those that are connected are served on"
        )

    def _resume_accepting(self) -> None:
        self._accept_again = 0.0
        self._selector.register(self._listener, _READ, self._accept)

    def _patience(self) -> float | None:
        if not self._accept_again:
            return None
        left = self._accept_again - time.monotonic()
        if left > 0:
            return left
        self._resume_accepting()
        return None

    # -- reading -----------------------------------------------------------------------------------------

    def _hand_over(self, conn: _Connection) -> bool:
        """Give a connection away if its first byte belongs to another protocol."""
        if self._adopt is None:
            return False
        try:
            first = conn.sock.recv(1, socket.MSG_PEEK)
        except OSError:
            return False  # nothing there yet, or reset: reading finds out
        if not first or first not in self._foreign:
            return False
        del self._connections[conn.id]
        self._silent.pop(conn.id, None)
        self._selector.unregister(conn.sock)
        self._adopt(conn.sock, conn.address)
        return True

    def _read(self, conn: _Connection) -> None:
        if conn.new and (conn.id not in self._connections or self._hand_over(conn)):
            return
        try:
            data = conn.sock.recv(_CHUNK if conn.parser.missing < _CHUNK else _BIG_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(conn)
            return
        if conn.new:
            conn.new = False
            self._silent.pop(conn.id, None)
            self._on_client(str(conn.address[0]))
        requests = conn.parser.feed(data)
        if not requests or conn.held:
            self._count_half_sent(conn, 0 if requests else conn.held + len(data))
        if len(requests) == 1 and conn.parser.error is None:
            # Nearly always: a client sends its next request when it has the reply to this one.
            try:
                replies = self._model.step(conn.id, requests[0])
            except TorchProtocolError as error:
                self._refuse(conn, error)
                return
            if replies:
                self._deliver(replies)
        else:
            conn.todo.extend(requests)
            self._work(conn)

    def _count_half_sent(self, conn: _Connection, held: int) -> None:
        self._half_sent += held - conn.held
        conn.held = held
        while self._half_sent > MAX_HALF_SENT:
            largest = max(self._connections.values(), key=lambda one: one.held)
            self._refuse(largest, TorchProtocolError("too many large requests arrive at the same time"))

    def _work(self, conn: _Connection) -> None:
        """Carry out what the connection has sent, as far as it reads its replies."""
        try:
            while conn.todo and conn.out_size < _HIGH_WATER:
                replies = self._model.step(conn.id, conn.todo.popleft())
                if replies:
                    self._deliver(replies)
            if not conn.todo and conn.parser.error is not None:
                raise conn.parser.error
        except TorchProtocolError as error:
            self._refuse(conn, error)

    # -- writing -----------------------------------------------------------------------------------------

    def _deliver(self, replies: Replies) -> None:
        for number, reply in replies:
            conn = self._connections.get(number)
            if conn is None:
                self._on_reply(number, reply)
            elif conn.out:
                conn.out.append(reply)
                conn.out_size += len(reply)
            else:
                self._send(conn, reply)

    def _send(self, conn: _Connection, reply: bytes) -> None:
        try:
            sent = conn.sock.send(reply)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the peer is gone: the next read finds out and drops it
        if sent < len(reply):
            conn.out.append(memoryview(reply)[sent:])
            conn.out_size = len(reply) - sent
            self._watch(conn, _WRITE)

    def _flush(self, conn: _Connection) -> None:
        try:
            while conn.out:
                first = conn.out[0]
                sent = conn.sock.send(first)
                conn.out_size -= sent
                if sent < len(first):
                    conn.out[0] = memoryview(first)[sent:]
                    return
                conn.out.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._drop(conn)
            return
        self._watch(conn, _READ)
        self._work(conn)

    def _watch(self, conn: _Connection, mask: int) -> None:
        # Never both: a peer that has replies to read is not listened to until it has read them.
        if conn.mask != mask:
            conn.mask = mask
            self._selector.modify(conn.sock, mask, conn)

    # -- ending ------------------------------------------------------------------------------------------

    def _refuse(self, conn: _Connection, error: TorchProtocolError) -> None:
        self._complain(f"torch store: closed the connection from {conn.address[0]}: {error}")
        self._drop(conn)

    def _drop(self, conn: _Connection) -> None:
        """Close a connection and remove it from the model, which may owe others a reply for it."""
        self._forget(conn)
        self._deliver(self._model.drop(conn.id))

    def _forget(self, conn: _Connection) -> None:
        if self._connections.pop(conn.id, None) is None:
            return  # an event for it came in the same batch as whatever closed it
        self._silent.pop(conn.id, None)
        self._half_sent -= conn.held
        self._selector.unregister(conn.sock)
        conn.sock.close()
        conn.todo.clear()
        conn.out.clear()
        if self._accept_again:
            self._resume_accepting()

    def _complain(self, text: str) -> None:
        """Say something once."""
        if text not in self._complaints and len(self._complaints) < _MOST_COMPLAINTS:
            self._complaints.add(text)
            self._log(text)
