"""A worker's side of kept state: saves into its memory file, and trees read from it.

A save copies into the region of the oldest slot and then publishes it (memory_file.py). Memory is reserved
before the first byte is copied, so that a save that does not fit is refused and all slots stay as they are.

Trees from `kept` are mapped, not copied. As long as one is in use its region is not written: a save takes
another region instead, and the memory is given back when the tree is gone.
"""

from __future__ import annotations

import os
import sys
import threading

from phalanx.core.record import Record
from phalanx.errors import StateError
from phalanx.worker.state.memory_file import REGIONS, SLOTS, MemoryFile, Room, SlotHeader, region_at
from phalanx.worker.state.pending_save import PendingSave
from phalanx.worker.state.tree_codec import EncodedTree, decode, encode, torch_view

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    import weakref
    from typing import Any

    from phalanx.worker.state.pinned_copy import PinnedMappings

VARIABLE = "PHALANX_STATE"
"""The descriptors of file and bell, the file's device and inode, and round, rank and world size."""

_CHUNK = 256 << 20  # reserved at a time: other ranks of this node may do the same, and are seen in between
_ROUNDED = 2 << 20


class StatePlace(Record):
    """Whose state it is: from the worker's environment."""

    fd: int
    bell: int
    device: int
    inode: int
    round: int
    rank: int
    world_size: int


class Kept(Record):
    """What `worker.kept` found."""

    tree: Any
    step: int
    rank: int  # which kept it, of
    world_size: int


def read_place(text: str) -> StatePlace | None:
    """The place that the agent gave to this process, if it did."""
    try:
        place = StatePlace(*(int(part) for part in text.split(",")))
        file = os.fstat(place.fd)
    except (ValueError, TypeError, OSError):
        return None
    return place if (file.st_dev, file.st_ino) == (place.device, place.inode) else None


class RankState:
    """The state of one rank, in the process that is this rank."""

    def __init__(self, place: StatePlace) -> None:
        self.place = place
        self._file = MemoryFile(place.fd)
        self._lock = threading.RLock()
        self._settled = False
        self._shared: dict[tuple[int, int], mmap.mmap] = {}  # (name, region) → to write to
        self._trees: list[tuple[int, int, weakref.ref[mmap.mmap]]] = []  # name, region, a tree's mapping
        self._pending: dict[int, PendingSave] = {}
        self._pinned: PinnedMappings | None = None

    @property
    def _slots(self) -> int:
        """Saves of a name that are held; one more where they are copied to another node (a bell is there)."""
        return SLOTS - 1 if self.place.bell < 0 else SLOTS

    def move(self, place: StatePlace) -> None:
        """Another round, in the same process and with the same file."""
        with self._lock:
            self.place = place
            self._settled = False

    # -- saving -------------------------------------------------------------------------------------

    def keep(self, name: str, tree: object, step: int, wait: bool) -> PendingSave:
        """Save a tree. Raises before anything is changed if it cannot be pickled or does not fit."""
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 62:
            raise ValueError(f"keep({name!r}, step={step!r}): give a step number of 0 or more")
        encoded = encode(tree)
        with self._lock:
            self._settle()
            number = self._file.number_of(name)
            self._finish(number)
            while True:
                room = self._file.room(number, self._slots, self._in_use(number))
                if room is None:
                    raise StateError("too many trees from kept() are still in use: drop them before keep()")
                self._reserve(name, number, room, encoded.used)
                if self._file.clear(number, room):
                    break
            self._release_unused(number, {room.region, *(header.region for header in room.held)})
            known = [*room.held] if room.victim is None else [room.victim, *room.held]
            newest = max(known, key=lambda header: header.age, default=None)
            header = SlotHeader(
                sequence=1 if newest is None else newest.sequence + 1,
                step=step,
                round=self.place.round,
                rank=self.place.rank,
                world_size=self.place.world_size,
                region=room.region,
                slot=room.slot,
                index_at=encoded.size,
                index_size=len(encoded.index),
                used=encoded.used,
            )
            return self._write(number, header, encoded, wait)

    def _write(self, number: int, header: SlotHeader, encoded: EncodedTree, wait: bool) -> PendingSave:
        mapping = self._mapping(number, header.region, encoded.used)
        on_device = []
        if encoded.tensors:
            torch: Any = sys.modules["torch"]
            for at, tensor in encoded.tensors:
                if tensor.is_cuda:
                    on_device.append((at, tensor))
                else:
                    torch_view(torch, mapping, at, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
        rest = None
        if on_device:
            if self._pinned is None:
                from phalanx.worker.state.pinned_copy import PinnedMappings

                self._pinned = PinnedMappings()
            rest = self._pinned.copy(on_device, mapping, wait)
        encoded.write(mapping)
        if rest is None:
            self._publish(number, header)
            return PendingSave()

        def finish() -> None:
            rest()
            self._publish(number, header)

        self._pending[number] = PendingSave(finish)
        return self._pending[number]

    def _publish(self, number: int, header: SlotHeader) -> None:
        self._file.publish(number, header)
        self._ring()

    def _ring(self) -> None:
        """The agent copies what is kept here."""
        if self.place.bell >= 0:
            try:
                os.write(self.place.bell, b"!")
            except OSError:
                pass  # full: the agent is going to look; or closed by the program

    def _mapping(self, number: int, region: int, size: int) -> mmap.mmap:
        """Mapped once: the pages of a region stay in this process's tables from one save to the next."""
        known = self._shared.get((number, region))
        if known is None or len(known) < size:
            if known is not None and self._pinned is not None:
                self._pinned.forget(known)
            known = self._file.shared(number, region, max(size, self._file.sizes(number)[region]))
            self._shared[number, region] = known
        return known

    def _finish(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.wait()

    # -- memory -------------------------------------------------------------------------------------

    def _in_use(self, number: int) -> set[int]:
        """Regions that trees in this process are views of."""
        self._trees = [tree for tree in self._trees if tree[2]() is not None]
        return {region for of, region, _ in self._trees if of == number}

    def _reserve(self, name: str, number: int, room: Room, used: int) -> None:
        region = room.region
        have = self._file.sizes(number)[region]
        if have >= used:
            return
        from phalanx.worker.state import memory_limit

        size = -(-used // _ROUNDED) * _ROUNDED
        # All slots are counted before the first is written: what does not fit is refused at once.
        first = not room.held and room.victim is None
        needed = size - have + (size * (self._slots - 1) if first else 0)
        start = have
        while start < size:
            available = memory_limit.available()
            if needed > available:
                problem = (
                    f"{needed / 1e9:.3f} GB of memory are needed, {available / 1e9:.3f} GB are available"
                )
                self._shrink(number, region, have)
                raise StateError(
                    f"keep({name!r}): {problem} ({self._slots} slots of {size / 1e9:.3f} GB): keep less, or "
                    "raise the memory limit of the job"
                )
            end = min(start + _CHUNK, size)
            try:
                self._file.grow(number, region, start, end)
            except OSError as error:
                self._shrink(number, region, have)
                raise StateError(f"keep({name!r}): {error.strerror} ({size / 1e9:.3f} GB)") from None
            needed -= end - start
            start = end

    def _shrink(self, number: int, region: int, size: int) -> None:
        """After a refusal: a region that had nothing gives back what it got; else the next save uses it."""
        if size == 0:
            self._file.release(number, region)

    def _release_unused(self, number: int, used: set[int]) -> None:
        """Give back what neither a slot nor a tree refers to."""
        sizes = self._file.sizes(number)
        for region in set(range(REGIONS)) - used - self._in_use(number):
            if sizes[region]:
                known = self._shared.pop((number, region), None)
                if known is not None and self._pinned is not None:
                    self._pinned.forget(known)
                self._file.release(number, region)

    # -- reading ------------------------------------------------------------------------------------

    def kept(self, name: str, step: int | None, anywhere: bool, device: object = None) -> Kept | None:
        """The newest whole save, or the one of a step; what was on a CUDA device, on `device`."""
        import weakref

        with self._lock:
            header, number = self._find(name, step, anywhere)
            if header is None:
                return None
            mapping = self._file.private(number, header)
            self._trees.append((number, header.region, weakref.ref(mapping)))
            load = None
            if device is not None:
                import torch  # noqa: F401 - its module is looked up there

                from phalanx.worker.state.device_load import DeviceLoad

                load = DeviceLoad(device)
            tree = decode(mapping, header.index_at, header.index_size, load)
            if load is not None:
                pinned = self._pinned_mapping(number, header)
                if pinned is not None and load.to_cuda:
                    load.run_pinned(pinned)
                else:
                    load.run(self.place.fd, region_at(number, header.region))
            return Kept(tree, header.step, header.rank, header.world_size)

    def _pinned_mapping(self, number: int, header: SlotHeader) -> mmap.mmap | None:
        """The mapping through which this process has saved, if it did."""
        known = self._shared.get((number, header.region))
        if known is None or self._pinned is None or len(known) < header.used or not self._pinned.has(known):
            return None
        return known

    def _find(self, name: str, step: int | None, anywhere: bool) -> tuple[SlotHeader | None, int]:
        for header, number in self._saves(name):
            here = header.place == (self.place.rank, self.place.world_size)
            if (here or anywhere) and step in (None, header.step):
                return header, number
        return None, -1

    def _saves(self, name: str) -> list[tuple[SlotHeader, int]]:
        self._settle()
        number = self._file.names().get(name)
        if number is None:
            return []
        self._finish(number)
        return [(header, number) for header in self._file.slots(number)]

    def _settle(self) -> None:
        """Wait until the agent has brought what other nodes or an earlier launch have for this rank."""
        if not self._settled:
            import fcntl

            fcntl.flock(self.place.fd, fcntl.LOCK_SH)
            fcntl.flock(self.place.fd, fcntl.LOCK_UN)
            self._settled = True

    # -- agreeing -----------------------------------------------------------------------------------

    def moments(self, name: str) -> list[tuple[int, int]]:
        """Step and round of each whole save of this place."""
        here = (self.place.rank, self.place.world_size)
        with self._lock:
            return [header.moment for header, _ in self._saves(name) if header.place == here]

    def forget_newer(self, name: str, moment: tuple[int, int]) -> None:
        """All ranks resume from this one: what was kept after it belongs to a past that did not happen.

        Older ones stay: other nodes may have a copy of those alone.
        """
        with self._lock:
            for header, number in self._saves(name):
                if header.moment == moment:
                    break
                self._file.invalidate(number, header.slot)
            self._ring()
