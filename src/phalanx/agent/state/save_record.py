"""One save outside of its memory file: a record of fixed size, and the bytes of its region after it.

This is what a file on disk (spill.py) and a message to another node (replicas.py) consist of. A record is
checked before anything in it is used; the bytes are copied and never interpreted here.
"""

from __future__ import annotations

import struct
import zlib

from phalanx.worker.state.memory_file import NAME_BYTES, SlotHeader

_RECORD = struct.Struct(f"<8sH{NAME_BYTES}sQqqIIQQQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"phxsave2"
SIZE = _RECORD.size + _CHECKSUM.size
MOST_BYTES = 1 << 41


def pack(name: str, header: SlotHeader) -> bytes:
    """The record of a save."""
    text = name.encode()
    fields = (header.sequence, header.step, header.round, header.rank, header.world_size)
    data = _RECORD.pack(_MAGIC, len(text), text, *fields, header.index_at, header.index_size, header.used)
    return data + _CHECKSUM.pack(zlib.crc32(data))


def unpack(data: bytes) -> tuple[str, SlotHeader]:
    """Name and header; ValueError for anything else. Its new place is not in it."""
    if len(data) != SIZE or _CHECKSUM.unpack_from(data, _RECORD.size)[0] != zlib.crc32(data[: _RECORD.size]):
        raise ValueError("not the record of a save")
    magic, length, text, *fields = _RECORD.unpack_from(data)
    sequence, step, round_, rank, world_size, index_at, index_size, used = fields
    if magic != _MAGIC or not 0 < length <= NAME_BYTES or not sequence:
        raise ValueError("not the record of a save")
    if index_at + index_size > used or used > MOST_BYTES:
        raise ValueError(f"a save with lengths that cannot be: {index_at} + {index_size} of {used} bytes")
    name = text[:length].decode("utf-8")
    return name, SlotHeader(sequence, step, round_, rank, world_size, 0, 0, index_at, index_size, used)
