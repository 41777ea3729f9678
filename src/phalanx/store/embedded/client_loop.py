"""The loop of the client's thread: it keeps a connection to the store, and replaces one that is silent.

A connection that ends is noticed at once. One that passes nothing any more, and stays open, is noticed by an
answer that does not come (answer_time). The client then opens another one beside it, in a thread, and goes on
listening: a store that was only slow is heard, and nothing has happened. When the other one is open and the
first is still silent, the client says Hello there, and the store's Welcome makes it the session's connection.

None of this may add to the load of a store that is merely busy. A store that has greeted an attempt is there:
no other attempt starts beside it for a while. The time that opening took counts as an answer's, by which the
first connection may not be silent after all. A client without a session has no lease to lose, and is patient.
Pauses between attempts are random, so that a thousand clients do not return in step.

The store takes a connection that its client closes for a sign that the client is gone, and shortens its
leases. So whatever has carried a Hello stays open until a newer one is welcome, however silent it is; if such
a connection ends before that, the client reports `disconnected`, because the store may have seen that, too.
The others are then reset, not closed: a Hello that is still on its way must not arrive after the newer one.
"""

from __future__ import annotations

import random
import selectors
import socket
import struct
from math import inf
from typing import TYPE_CHECKING

from phalanx.job.time_budgets import REDIAL
from phalanx.store.embedded import dialling
from phalanx.store.net import wire

if TYPE_CHECKING:
    from phalanx.store.embedded.client import Client

_CHUNK = 256 << 10
_FIRST_PAUSE = 0.05
_MOST = 6  # attempts at a time: one that is not answered may be one that is answered late
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Line:
    """A connection that has carried a Hello."""

    __slots__ = ("frames", "heard", "seal", "since", "sock", "unsent")

    def __init__(self, opened: dialling.Opened, hello: wire.Hello, now: float) -> None:
        self.sock, self.frames, self.seal = opened
        self.unsent = bytearray(self.seal.sealed(wire.encode(0, 0, hello)))
        self.since = self.heard = now


class ClientLoop:
    """What the client's thread does until the session is closed or lost."""

    def __init__(self, client: Client) -> None:
        self._client, self._time = client, client.answer_time
        self._selector = selectors.DefaultSelector()
        self._line: Line | None = None  # the one in use
        self._offer: Line | None = None  # the newest one, without a Welcome yet
        self._kept: list[Line] = []  # older ones without a Welcome
        self._attempts: list[dialling.Attempt] = []
        self._away_since = client.clock()
        self._dial_at: float | None = self._away_since
        self._pause = _FIRST_PAUSE
        self._has_failed = False  # an attempt beside the line in use
        self._silence: tuple[float, float | None] = 0.0, None  # since when, and the oldest request by then
        self._end_by: float | None = None

    def run(self) -> None:
        """Until closed, and everything is sent that was asked to be, or lost."""
        self._selector.register(self._client.wakes, selectors.EVENT_READ)
        try:
            while self._client.lost is None and not self._is_finished():
                self._turn()
        finally:
            self._cancel_attempts()
            for line in self._lines():
                line.sock.close()
            self._selector.close()

    def _is_finished(self) -> bool:
        if not self._client.closing:
            return False
        now, line = self._client.clock(), self._line
        self._end_by = self._end_by or now + self._time.longest
        if line is not None:
            self._flush(line)
        return self._line is None or not self._line.unsent or now >= self._end_by

    def _lines(self) -> list[Line]:
        return [line for line in (self._line, self._offer, *self._kept) if line is not None]

    @property
    def _is_looking(self) -> bool:
        """Whether another connection is wanted."""
        return self._dial_at is not None or bool(self._attempts) or self._offer is not None

    def _turn(self) -> None:
        for line in (self._line, self._offer):
            if line is not None:
                self._flush(line)
        for key, mask in self._selector.select(self._time_left()):
            if key.data is None:
                self._client.wakes.take()
            elif mask & selectors.EVENT_READ and key.data in self._lines():
                self._read(key.data)
        if not self._client.closing:
            self._look_around(self._client.clock())  # first: the line in use may have answered
            for attempt in [one for one in self._attempts if one.over]:
                self._take_up(attempt)

    # Time

    @property
    def _patience(self) -> float:
        """How long an attempt, or a connection without a Welcome, is waited for before another is made."""
        return self._time.longest if self._client.welcome is None else self._time.seconds

    def _silent_at(self) -> float | None:
        """When the line in use counts as silent, unless something comes."""
        asked = self._client.asked_at()
        if self._line is None or asked is None:
            return None
        return min(max(asked, self._line.heard) + self._time.seconds, asked + self._time.longest)

    def _time_left(self) -> float | None:
        now = self._client.clock()
        if self._end_by is not None:
            return max(0.0, self._end_by - now)
        times = []
        if self._offer is not None:
            times.append(self._offer.since + self._patience)
        elif self._dial_at is not None:
            times.append(self._dial_at)
        spare = any(attempt.opened is not None for attempt in self._attempts)
        if (spare or not self._is_looking) and (silent := self._silent_at()) is not None:
            times.append(silent)
        return max(0.0, min(times) - now) if times else None

    def _look_around(self, now: float) -> None:
        offer, line = self._offer, self._line
        if offer is not None and now >= offer.since + self._patience:
            self._kept.append(offer)
            self._offer, self._dial_at = None, now
            self._time.missed()
        elif line is not None and not self._is_looking:
            silent = self._silent_at()
            if silent is not None and now >= silent:
                self._silence = now, self._client.asked_at()
                self._away_since, self._dial_at, self._pause = line.heard, now, _FIRST_PAUSE
        elif line is not None and offer is None and self._has_answered(line, now):
            self._stop_looking()
        if self._dial_at is not None and now >= self._dial_at and self._offer is None:
            greeted = [attempt.greeted_at for attempt in self._attempts if attempt.greeted_at is not None]
            self._dial_at = max(greeted, default=-inf) + self._time.longest
            if now >= self._dial_at:
                self._dial()

    def _has_answered(self, line: Line, now: float) -> bool:
        """Whether the line in use, which was silent, is not any more."""
        since, asked = self._silence
        is_late = asked is not None and now >= asked + self._time.longest
        return self._client.asked_at() != asked or (line.heard > since and not is_late)

    def _stop_looking(self) -> None:
        """The line in use has answered after all."""
        self._cancel_attempts()
        self._dial_at = None
        if self._has_failed:
            self._has_failed = False
            self._client.heard_again()

    # Opening

    def _dial(self) -> None:
        """Begin an attempt, and plan the next one beside it, in case that nothing comes of this one."""
        if self._attempts:
            self._time.missed()
        self._attempts.append(dialling.Attempt(self._client, self._client.wake))
        again = len(self._attempts) < _MOST
        self._dial_at = self._client.clock() + self._patience if again else None

    def _cancel_attempts(self) -> None:
        for attempt in self._attempts:
            attempt.cancel()
        self._attempts.clear()

    def _take_up(self, attempt: dialling.Attempt) -> None:
        if attempt.opened is None:
            assert attempt.error is not None
            self._attempts.remove(attempt)
            self._fail(attempt.error, attempt.began)
            return
        if self._offer is not None:
            return  # this one comes next, if the one before it is silent
        now = self._client.clock()
        assert attempt.greeted_at is not None
        self._time.answered(attempt.greeted_at - attempt.began)
        silent = self._silent_at()
        if silent is not None and now < silent:
            return  # the store is slow, and the line in use may still answer
        self._attempts.remove(attempt)
        self._dial_at = None
        opened = attempt.opened
        opened.sock.setblocking(False)
        self._offer = Line(opened, self._client.hello(), now)
        self._selector.register(opened.sock, selectors.EVENT_READ, self._offer)
        self._flush(self._offer)

    def _fail(self, error: Exception, began: float) -> None:
        self._has_failed = True
        self._client.failed(error, began, self._away_since)
        now = self._client.clock()
        if self._offer is None and not self._attempts:
            # One that took its time needs no rest after it.
            again = max(now, began + self._pause * random.uniform(0.5, 1.5))
            self._dial_at = min(again, max(now, self._away_since + self._client.grace))
        self._pause = min(self._pause * 2, REDIAL)

    def _take_welcome(self, line: Line, frame: wire.Frame) -> None:
        if not isinstance(frame.body, wire.Welcome):
            raise wire.WireError(f"{type(frame.body).__name__} instead of a welcome")
        line.frames.cap = wire.CAP
        old = [one for one in self._lines() if one is not line]
        self._line, self._offer, self._kept = line, None, []
        self._cancel_attempts()
        self._dial_at, self._pause, self._has_failed = None, _FIRST_PAUSE, False
        for one in old:
            self._close(one, at_once=True)
        line.heard = self._client.clock()
        self._time.answered(line.heard - line.since)
        self._client.welcomed(frame.body)

    # Conversing

    def _flush(self, line: Line) -> None:
        backlog = len(line.unsent)
        if line is self._line:
            for packed in self._client.to_send():
                line.unsent += line.seal.sealed(packed)
        if line.unsent:
            try:
                sent = line.sock.send(line.unsent[:_CHUNK])
            except BlockingIOError:
                sent = 0
            except (OSError, wire.WireError):
                self._end(line)
                return
            del line.unsent[:sent]
            if sent and backlog:
                line.heard = self._client.clock()  # the other side takes what it was sent
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
        if self._selector.get_key(line.sock).events != wanted:
            self._selector.modify(line.sock, wanted, line)

    def _read(self, line: Line) -> None:
        try:
            data = line.sock.recv(_CHUNK)
        except BlockingIOError:
            return  # part of a TLS record
        except (OSError, wire.WireError):
            data = b""
        if not data:
            self._end(line)
            return
        line.heard = self._client.clock()
        try:
            for frame in line.frames.feed(data):
                if line is self._line:
                    self._client.take_in(frame)
                elif line is self._offer:
                    self._take_welcome(line, frame)
        except wire.WireError:
            self._end(line)  # whatever it was, the answer is a new connection

    def _end(self, line: Line) -> None:
        """A connection that the store may know as the session's is over."""
        self._close(line)
        now = self._client.clock()
        in_use, offered = line is self._line, line is self._offer
        if in_use:
            self._line = None
            self._away_since, self._pause = now, _FIRST_PAUSE
            if not self._is_looking:
                self._dial_at = now
        elif offered:
            self._offer = None
        else:
            self._kept.remove(line)
        if self._client.welcome is not None:
            self._client.hung_up(offline=in_use)
            if self._line is not None:
                self._client.heard_again()  # so that the lease is renewed there, if it can be
        if offered:
            ended = ConnectionResetError("the store closed the connection during the handshake")
            self._fail(ended, line.since)

    def _close(self, line: Line, *, at_once: bool = False) -> None:
        self._selector.unregister(line.sock)
        if at_once:
            try:
                line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            except OSError:
                pass  # it has ended already
        line.sock.close()
