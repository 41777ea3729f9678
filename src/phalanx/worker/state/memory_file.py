"""The memory file of one rank: what it has kept, by name, with up to three slots each.

    head      a magic number, and a table of names; each has its slot headers, its pins and the sizes of its
              regions
    regions   the data; every name has several, far apart in a sparse file, so that each can grow in place

A save writes into a region that no valid slot refers to, and then the slot's header, in one write and with a
checksum. The newest slot is the one of the latest round with the highest sequence number; there is no pointer
to flip.

A worker's file has two slots in use, or three where its state is copied to another node. There the agent pins
the save that every rank and every copy has, and the one that is to replace it (core/common_saves.py). A save
takes the oldest slot that is not pinned.

Invariants
- A process that is killed at any moment leaves the pinned saves, or, where none is pinned, at least the slot
  that was the newest: their headers and regions are not touched by the next save.
- A pin holds if the slot is valid after the pin was written: the worker reads the pins again after it has
  invalidated a slot, and restores it if they have changed.
- A reader in another process (the agent, which copies to another node or to disk) reads the header again
  after the data: if it is unchanged, so is the data.
- The file is anonymous and has no limit but memory: /dev/shm, and its size, play no part.
- One process writes at a time: the worker, or the agent while there is no worker or it waits for the lock.
"""

from __future__ import annotations

import os
import struct

from phalanx.core.common_saves import Moment, first_since
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap  # imported on first use: the agent, which only holds the file, starts without it
    from collections.abc import Iterable, Iterator

MAGIC = b"phxkeep1"
NAMES = 64
NAME_BYTES = 200
REGIONS = 6  # two or three are in use; the others serve while trees that were read are still mapped
_ENTRY = 1024
_ENTRIES_AT = 4096
_SLOTS_AT = (256, 384, 640)
SLOTS = len(_SLOTS_AT)  # that a name can have
_SIZES_AT = 512
_PINS_AT = 768
_REGION = 1 << 41  # 2 TiB of address space for each
_DATA_AT = 1 << 44
SIZE = 1 << 52

_NAME = struct.Struct(f"<H{NAME_BYTES}sI")  # length, name, checksum
_SLOT = struct.Struct("<QqqIIIIQQQ")
_PINS = struct.Struct("<qqqq")  # step and round of each, step -1: none
_CHECKSUM = struct.Struct("<I")
_SIZE = struct.Struct("<Q")
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class SlotHeader(Record):
    """One save that is whole."""

    sequence: int
    step: int
    round: int  # in which it was kept
    rank: int  # which kept it, of
    world_size: int
    region: int
    slot: int  # its place in the table
    index_at: int  # where in the region the index starts; the data is before it
    index_size: int
    used: int  # bytes of the region

    @property
    def place(self) -> tuple[int, int]:
        """Whose state it is: the rank, and of how many."""
        return self.rank, self.world_size

    @property
    def moment(self) -> tuple[int, int]:
        """Which state it is: the same step may have been reached twice, in two rounds."""
        return self.step, self.round

    @property
    def age(self) -> tuple[int, int]:
        """The newest save of a rank and name has the highest."""
        return self.round, self.sequence


class Pins(Record):
    """Which saves are not replaced."""

    common: Moment | None = None  # every rank has it, and so has every copy
    hold: Moment | None = None  # the first save at or after this one is about to be

    def of(self, slots: Iterable[SlotHeader]) -> set[Moment]:
        """The moments of these saves that stay."""
        moments = [header.moment for header in slots]
        return {one for one in (self.common, first_since(moments, self.hold)) if one is not None}


class Room(Record):
    """Where the next save goes, and what it replaces."""

    slot: int
    region: int
    victim: SlotHeader | None
    held: tuple[SlotHeader, ...]  # stay valid
    pins: Pins  # when it was chosen

    @property
    def is_pinned(self) -> bool:
        """Whether it would replace a save that is to stay: all slots have one."""
        return self.victim is not None and self.victim.moment in self.pins.of([self.victim, *self.held])


class MemoryFile:
    """The file, and its table. Mappings belong to the callers."""

    def __init__(self, fd: int) -> None:
        """An existing file; ValueError if it is something else."""
        self.fd = fd
        if os.pread(fd, len(MAGIC), 0) != MAGIC:
            raise ValueError("not a file of kept state")

    @classmethod
    def create(cls) -> MemoryFile:
        """A new, empty one; OSError where the system does not offer it."""
        fd = os.memfd_create("phalanx-state", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, SIZE)  # sparse: takes no memory
            os.pwrite(fd, MAGIC, 0)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    # -- the table ----------------------------------------------------------------------------------

    def names(self) -> dict[str, int]:
        """Name → its number in the table."""
        table = os.pread(self.fd, NAMES * _ENTRY, _ENTRIES_AT)
        found = {}
        for number in range(NAMES):
            length, name, checksum = _NAME.unpack_from(table, number * _ENTRY)
            if 0 < length <= NAME_BYTES and checksum == _crc(name[:length]):
                found[name[:length].decode("utf-8", "replace")] = number
        return found

    def number_of(self, name: str) -> int:
        """The number of a name, which is added to the table if it is new."""
        known = self.names()
        if name in known:
            return known[name]
        text = name.encode()
        if not 0 < len(text) <= NAME_BYTES:
            raise ValueError(f"name {name!r}: give a name of 1 to {NAME_BYTES} bytes")
        free = set(range(NAMES)) - set(known.values())
        if not free:
            raise ValueError(f"name {name!r}: {NAMES} names are kept already, and there is no room for more")
        number = min(free)
        os.pwrite(self.fd, _NAME.pack(len(text), text, _crc(text)), self._entry(number))
        return number

    def slots(self, number: int) -> list[SlotHeader]:
        """The whole saves of a name, newest first."""
        found = []
        for slot, at in enumerate(_SLOTS_AT):
            data = os.pread(self.fd, _SLOT.size + _CHECKSUM.size, self._entry(number) + at)
            if _CHECKSUM.unpack_from(data, _SLOT.size)[0] != _crc(data[: _SLOT.size]):
                continue
            sequence, step, round_, rank, world, region, _, index_at, index_size, used = _SLOT.unpack_from(
                data
            )
            whole = index_at + index_size <= used <= _REGION and region < REGIONS
            if sequence and whole:
                found.append(
                    SlotHeader(sequence, step, round_, rank, world, region, slot, index_at, index_size, used)
                )
        return sorted(found, key=lambda header: header.age, reverse=True)

    def publish(self, number: int, header: SlotHeader) -> None:
        """Make a save valid: the last write of a save."""
        fields = (
            header.sequence,
            header.step,
            header.round,
            header.rank,
            header.world_size,
            header.region,
            0,
        )
        data = _SLOT.pack(*fields, header.index_at, header.index_size, header.used)
        os.pwrite(self.fd, data + _CHECKSUM.pack(_crc(data)), self._entry(number) + _SLOTS_AT[header.slot])

    def invalidate(self, number: int, slot: int) -> None:
        """Forget a save; before its region is written."""
        os.pwrite(self.fd, bytes(_SLOT.size + _CHECKSUM.size), self._entry(number) + _SLOTS_AT[slot])

    def pins(self, number: int) -> Pins:
        """The saves of a name that stay."""
        while True:
            data = os.pread(self.fd, _PINS.size + _CHECKSUM.size, self._entry(number) + _PINS_AT)
            if not any(data):
                return Pins()
            if _CHECKSUM.unpack_from(data, _PINS.size)[0] == _crc(data[: _PINS.size]):
                break  # else it is being written
        step, round_, next_step, next_round = _PINS.unpack_from(data)
        return Pins(None if step < 0 else (step, round_), None if next_step < 0 else (next_step, next_round))

    def pin(self, number: int, pins: Pins) -> None:
        """Keep the saves of these moments; for the agent."""
        if pins != self.pins(number):
            data = _PINS.pack(*(pins.common or (-1, 0)), *(pins.hold or (-1, 0)))
            os.pwrite(self.fd, data + _CHECKSUM.pack(_crc(data)), self._entry(number) + _PINS_AT)

    def room(self, number: int, count: int, taken: Iterable[int] = ()) -> Room | None:
        """Where the next save of a name goes, if it has `count` slots; None: all regions are `taken`."""
        slots, pins = self.slots(number), self.pins(number)
        empty = set(range(count)) - {header.slot for header in slots}
        victim = None
        if not empty:
            loose = [header for header in slots if header.moment not in pins.of(slots)]
            victim = (loose or slots[:1])[-1]  # oldest; where all are pinned, the newest
        held = tuple(header for header in slots if header is not victim)
        sizes = self.sizes(number)
        free = set(range(REGIONS)) - {header.region for header in held} - set(taken)
        if not free:
            return None
        region = max(free, key=lambda one: (sizes[one], -one))
        return Room(min(empty) if victim is None else victim.slot, region, victim, held, pins)

    def clear(self, number: int, room: Room) -> bool:
        """Give up what is replaced; False: it was pinned meanwhile and is still there."""
        if room.victim is not None:
            self.invalidate(number, room.victim.slot)
            if self.pins(number) != room.pins:
                self.publish(number, room.victim)
                return False
        return True

    # -- the regions --------------------------------------------------------------------------------

    def sizes(self, number: int) -> list[int]:
        """How many bytes of memory each region of a name has."""
        data = os.pread(self.fd, REGIONS * _SIZE.size, self._entry(number) + _SIZES_AT)
        return [size for (size,) in _SIZE.iter_unpack(data)]

    def grow(self, number: int, region: int, start: int, size: int) -> None:
        """Give a region memory from `start` up to `size` bytes; OSError if there is none."""
        os.posix_fallocate(self.fd, region_at(number, region) + start, size - start)
        self._note_size(number, region, size)

    def release(self, number: int, region: int) -> None:
        """Give the memory of a region back."""
        punch(self.fd, region_at(number, region), _REGION)
        self._note_size(number, region, 0)

    def _note_size(self, number: int, region: int, size: int) -> None:
        os.pwrite(self.fd, _SIZE.pack(size), self._entry(number) + _SIZES_AT + region * _SIZE.size)

    def shared(self, number: int, region: int, size: int) -> mmap.mmap:
        """A mapping to write to."""
        import mmap

        return _undumped(mmap.mmap(self.fd, _pages(size), offset=region_at(number, region)))

    def private(self, number: int, header: SlotHeader) -> mmap.mmap:
        """A mapping of a save. What is written to it stays in this process."""
        import mmap

        start = region_at(number, header.region)
        return _undumped(mmap.mmap(self.fd, _pages(header.used), access=mmap.ACCESS_COPY, offset=start))

    def copy(self, number: int, header: SlotHeader, chunk: int = 1 << 22) -> Iterator[bytes]:
        """The bytes of a save. The caller checks afterwards that `slots` still has this header."""
        start, end = region_at(number, header.region), header.used
        for at in range(0, end, chunk):
            yield os.pread(self.fd, min(chunk, end - at), start + at)

    def index(self, number: int, header: SlotHeader) -> bytes:
        """What describes the data of a save."""
        return os.pread(self.fd, header.index_size, region_at(number, header.region) + header.index_at)

    def is_empty(self) -> bool:
        """Whether nothing is kept in it."""
        return not any(self.slots(number) for number in self.names().values())

    def close(self) -> None:
        """Close it; the memory is free when nothing else has it open or mapped."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @staticmethod
    def _entry(number: int) -> int:
        return _ENTRIES_AT + number * _ENTRY


class FileLock:
    """Keeps the worker from using its file.

    It belongs to another opening of the same file: the worker has a copy of the agent's own descriptor, which
    would share the lock. The lock ends with this process.
    """

    def __init__(self, file: MemoryFile, wait: bool = True) -> None:
        """BlockingIOError if it is held by another, and `wait` is false."""
        import fcntl

        self.file = MemoryFile(os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC))
        try:
            fcntl.flock(self.file.fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BaseException:
            self.file.close()
            raise

    def release(self) -> None:
        """Let the worker go on."""
        self.file.close()


def region_at(number: int, region: int) -> int:
    """Where a region starts in the file."""
    return _DATA_AT + (number * 8 + region) * _REGION


def punch(fd: int, start: int, size: int) -> None:
    """Give memory back to the system; does nothing where that is not possible."""
    import ctypes

    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    fallocate(fd, _PUNCH, start, size)


def _undumped(mapping: mmap.mmap) -> mmap.mmap:
    """A mapping that is not part of a core dump, which would be as large as all that is kept."""
    import mmap

    try:
        mapping.madvise(mmap.MADV_DONTDUMP)
    except (AttributeError, OSError):
        pass
    return mapping


def _pages(size: int) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    return max(1, -(-size // page)) * page


def _crc(data: bytes) -> int:
    from zlib import crc32

    return crc32(data, 0x70)  # not 0: a header of zeros must not be valid
