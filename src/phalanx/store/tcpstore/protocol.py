"""The bytes of torch's TCPStore protocol: opcodes, limits, and an incremental parser. No sockets.

A request is one opcode byte followed by its fields, without any framing; a text field is a uint64 length and
that many bytes; integers are in host order, as torch's client sends them. What a request means is in
`model`; the connections are in `server`.

Invariants:
- However the bytes are cut into chunks, the same requests come out in the same order.
- A length is compared with its limit before the bytes it announces are kept. What is held back is at most one
  unfinished field, and it grows only with bytes that really arrived: a claim of 8 MiB costs nothing.
- Every byte is looked at a constant number of times, even if a large request arrives byte by byte.
- Nothing but `TorchProtocolError` comes out of bad input, after the good requests that preceded it.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

from phalanx.errors import StoreError

VALIDATE = 0
SET = 1
COMPARE_SET = 2
GET = 3
ADD = 4
CHECK = 5
WAIT = 6
GETNUMKEYS = 7
DELETE_KEY = 8
APPEND = 9
MULTI_GET = 10
MULTI_SET = 11
CANCEL_WAIT = 12
PING = 13
QUEUE_PUSH = 14
QUEUE_POP = 15
QUEUE_LEN = 16
LIST_KEYS = 17
BARRIER = 18

MAGIC = 0x3C85F7CE
MAX_KEY = 8 * 1024
MAX_PAYLOAD = 8 * 1024 * 1024
MAX_KEYS = 128 * 1024

# An opcode and its fields in wire order. The number in front of repeated fields is not kept (it is the length
# of the list): WAIT gives [key, key, …], MULTI_SET gives [key, value, key, value, …]. A plain tuple: making a
# named one for every small request would be felt.
Request: TypeAlias = tuple[int, list[Any]]

INT64 = struct.Struct("=q")
UINT64 = struct.Struct("=Q")
UINT32 = struct.Struct("=I")

_KEY, _PAYLOAD, _INT64, _UINT32 = range(4)
_COUNT_PENDING = -1
# By opcode: the kinds of its fields, and how many there are; or, where a number of repetitions comes first,
# the kinds of one repetition.
_LAYOUT: tuple[tuple[tuple[int, ...], int], ...] = (
    ((_UINT32,), 1),  # VALIDATE
    ((_KEY, _PAYLOAD), 2),  # SET
    ((_KEY, _PAYLOAD, _PAYLOAD), 3),  # COMPARE_SET
    ((_KEY,), 1),  # GET
    ((_KEY, _INT64), 2),  # ADD
    ((_KEY,), _COUNT_PENDING),  # CHECK
    ((_KEY,), _COUNT_PENDING),  # WAIT
    ((), 0),  # GETNUMKEYS
    ((_KEY,), 1),  # DELETE_KEY
    ((_KEY, _PAYLOAD), 2),  # APPEND
    ((_KEY,), _COUNT_PENDING),  # MULTI_GET
    ((_KEY, _PAYLOAD), _COUNT_PENDING),  # MULTI_SET
    ((), 0),  # CANCEL_WAIT
    ((_UINT32,), 1),  # PING
    ((_KEY, _PAYLOAD), 2),  # QUEUE_PUSH
    ((_KEY,), 1),  # QUEUE_POP
    ((_KEY,), 1),  # QUEUE_LEN
    ((), 0),  # LIST_KEYS
    ((_KEY, _INT64), 2),  # BARRIER
)
SILENT = frozenset({SET, APPEND, MULTI_SET, QUEUE_PUSH})  # requests without any reply
_LIMIT = {_KEY: MAX_KEY, _PAYLOAD: MAX_PAYLOAD}


class TorchProtocolError(StoreError):
    """Bytes or a request that no client of torch's TCPStore sends; its connection is to be closed."""


class RequestParser:
    """Turns the bytes of one connection into requests; the opening VALIDATE is checked and kept here."""

    __slots__ = ("_args", "_fields", "_left", "_need", "_op", "_rest", "_validated", "error")

    def __init__(self) -> None:
        self.error: TorchProtocolError | None = None
        self._validated = False
        self._rest = bytearray()  # starts at the first field that is not complete
        self._need = 1  # how long _rest must be before another look at it can help
        self._op = -1  # the request being read, -1 between requests
        self._args: list[Any] = []
        self._fields: tuple[int, ...] = ()
        self._left = 0  # fields still to come, _COUNT_PENDING when their number is itself to come

    @property
    def missing(self) -> int:
        """Bytes that must arrive before the next field is complete; a hint for how much to read."""
        return self._need - len(self._rest)

    def feed(self, data: bytes) -> list[Request]:
        """The requests that `data` completes; when it is bad, `error` is set and later bytes are ignored.

        The error is kept beside the requests, not raised, since what came before it in the same chunk counts.
        """
        if self.error is not None:
            return []
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        done: list[Request] = []
        try:
            used = self._parse(data, done)
        except TorchProtocolError as error:
            self.error = error
            return done
        if used < len(data):
            self._rest += data[used:] if used else data
        return done

    def _parse(self, data: bytes, done: list[Request]) -> int:
        """Move whole requests from `data` to `done`; how many bytes were used up."""
        pos, end = 0, len(data)
        while True:
            if self._op < 0:
                if pos == end:
                    self._need = 1
                    return pos
                self._begin(data[pos])
                pos += 1
            if self._left == _COUNT_PENDING:
                if end - pos < 8:
                    self._need = 8
                    return pos
                self._left = self._counted(UINT64.unpack_from(data, pos)[0])
                pos += 8
            if self._left:
                pos = self._take_fields(data, pos, end)
                if self._left:
                    return pos
            if self._op == VALIDATE:
                self._check_magic(self._args[0])
            else:
                done.append((self._op, self._args))
            self._op = -1

    def _begin(self, op: int) -> None:
        if op > BARRIER or (op == VALIDATE) is self._validated:
            raise self._misplaced(op)
        self._op = op
        self._fields, self._left = _LAYOUT[op]
        self._args = []

    def _misplaced(self, op: int) -> TorchProtocolError:
        if not self._validated:
            return TorchProtocolError(
                f"the first byte is {op}, not {VALIDATE} (VALIDATE): "
                "this is not a client of torch's TCPStore; point it at another port"
            )
        if op == VALIDATE:
            return TorchProtocolError("a second VALIDATE on one connection: the stream is out of step")
        return TorchProtocolError(
            f"opcode {op} is unknown (0 to {BARRIER} are served): "
            "the client speaks a newer protocol, or the stream is out of step"
        )

    def _counted(self, count: int) -> int:
        if count > MAX_KEYS:
            raise TorchProtocolError(f"{count} keys in one request (opcode {self._op}): at most {MAX_KEYS}")
        return count * len(self._fields)

    def _check_magic(self, magic: int) -> None:
        if magic != MAGIC:
            raise TorchProtocolError(
                f"magic number 0x{magic:08X}, expected 0x{MAGIC:08X}: "
                "this is not a client of torch's TCPStore, or one with another byte order"
            )
        self._validated = True

    def _take_fields(self, data: bytes, pos: int, end: int) -> int:
        """Read the fields that are complete; the position after them. `_need` is the length of the next."""
        args, fields, left = self._args, self._fields, self._left
        stride = len(fields)
        while left:
            # For fixed and repeated layouts alike the fields still to come end with a whole stride.
            kind = fields[-left % stride]
            if kind <= _PAYLOAD:
                size = 8
                if end - pos >= 8:
                    length: int = UINT64.unpack_from(data, pos)[0]
                    if length > _LIMIT[kind]:
                        what = "key" if kind == _KEY else "value"
                        raise TorchProtocolError(
                            f"a {what} of {length} bytes (opcode {self._op}): at most {_LIMIT[kind]}"
                        )
                    size += length
                    if end - pos >= size:
                        args.append(data[pos + 8 : pos + size])
                        pos += size
                        left -= 1
                        continue
            else:
                number = INT64 if kind == _INT64 else UINT32
                size = number.size
                if end - pos >= size:
                    args.append(number.unpack_from(data, pos)[0])
                    pos += size
                    left -= 1
                    continue
            self._need = size
            break
        self._left = left
        return pos
