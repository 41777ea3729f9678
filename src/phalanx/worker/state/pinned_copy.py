"""Copies of CUDA tensors into a memory file: through memory that is pinned once, on a stream of their own.

A region's mapping is registered with the driver when the first CUDA tensor is saved to it; from then on the
device writes to it directly, at the speed of the bus.

With `wait=False` the program goes on at once, and what it computes next must not change what is being saved.
So the tensors are first copied within the device, which takes milliseconds, as far as there is room for it;
the rest is copied to the host. The program's own stream waits for both, on the device; the host does not.
After that, the copies within the device are copied to the host beside whatever is computed.
"""

from __future__ import annotations

import sys

from phalanx.worker.state.tree_codec import torch_view

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from typing import Any

    Placed = list[tuple[int, Any]]  # offset in the mapping, tensor

_PORTABLE = 1  # pinned for all devices
_SPARE = 0.1  # the part of the device's free memory that copies leave to the program


class PinnedMappings:
    """The registered mappings of this process, and a stream for each device."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._registered: dict[int, tuple[int, mmap.mmap]] = {}  # address → size, mapping
        self._streams: dict[int, Any] = {}

    def copy(self, tensors: Placed, mapping: mmap.mmap, wait: bool) -> Callable[[], None] | None:
        """Copy tensors to their places; None when that is done, else what completes it."""
        self._register(mapping)
        by_device: dict[int, Placed] = {}
        for at, tensor in tensors:
            by_device.setdefault(tensor.device.index, []).append((at, tensor))
        ends = []
        for device, placed in by_device.items():
            with self._torch.cuda.device(device):
                ends.append(self._copy_on(device, placed, mapping, wait))

        def finish() -> None:
            for end in ends:
                end.synchronize()

        if not wait:
            return finish
        finish()
        return None

    def _copy_on(self, device: int, placed: Placed, mapping: mmap.mmap, wait: bool) -> Any:
        """Queue the copies of one device; the event of their end."""
        cuda = self._torch.cuda
        own = cuda.current_stream()
        if device not in self._streams:
            self._streams[device] = cuda.Stream()
        side = self._streams[device]
        side.wait_stream(own)
        with cuda.stream(side):
            later = [] if wait else self._snapshot(device, placed)
            taken = {at for at, _ in later}
            self._to_host([one for one in placed if one[0] not in taken], mapping)
            for _, tensor in placed:
                tensor.record_stream(side)
            own.wait_stream(side)
            self._to_host(later, mapping)
            end = cuda.Event()
            end.record(side)
        return end

    def _snapshot(self, device: int, placed: Placed) -> Placed:
        """Copies within the device of as many tensors as there is room for."""
        cuda = self._torch.cuda
        unused = cuda.memory_reserved(device) - cuda.memory_allocated(device)
        room = (1 - _SPARE) * (cuda.mem_get_info(device)[0] + unused)
        copies = []
        for at, tensor in placed:
            size = tensor.numel() * tensor.element_size()
            if size > room:
                continue
            try:
                copies.append((at, tensor.clone()))
            except cuda.OutOfMemoryError:
                break
            room -= size
        return copies

    def _to_host(self, placed: Placed, mapping: mmap.mmap) -> None:
        for at, tensor in placed:
            view = torch_view(self._torch, mapping, at, tensor.dtype, tuple(tensor.shape))
            view.copy_(tensor, non_blocking=True)

    def _register(self, mapping: mmap.mmap) -> None:
        address = self._torch.frombuffer(mapping, dtype=self._torch.uint8, count=1).data_ptr()
        size = len(mapping)
        if self._registered.get(address, (0, None))[0] == size:
            return
        self._torch.cuda.init()
        result = self._torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)
        if int(result) != 0:
            # Copies are slower, and correct: they wait for the device.
            from phalanx.log import warn

            warn(f"worker.keep: {size / 1e9:.1f} GB could not be pinned (CUDA error {int(result)})")
        self._registered[address] = (size, mapping)  # also where it failed: it would fail again

    def has(self, mapping: mmap.mmap) -> bool:
        """Whether the driver knows this mapping."""
        return any(known is mapping for _, known in self._registered.values())

    def forget(self, mapping: mmap.mmap) -> None:
        """This mapping is not used any more."""
        for address, (_, known) in list(self._registered.items()):
            if known is mapping:
                self._torch.cuda.cudart().cudaHostUnregister(address)
                del self._registered[address]
