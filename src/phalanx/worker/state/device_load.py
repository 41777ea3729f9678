"""Tensors from a memory file onto a device.

A process that has saved to a region has it mapped and pinned; the device reads it at the speed of the bus. In
a new process the mapping would have to be pinned first, which takes longer than the copy, or would be copied
by the driver at the speed of one processor. There, several threads each read a part of the file into one of
their two pinned buffers, without any page of it being mapped, while the other is on its way to the device.
Pinning the buffers takes time as well; a standby has done it before they are needed.
"""

from __future__ import annotations

import os
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from typing import Any

_THREADS = 8
_PART = 4 << 20


def pin_ahead() -> None:
    """Let torch keep as much pinned memory at hand as a load needs, if this process uses a GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            _buffers(torch, 2 * _threads(), True)
        except RuntimeError:
            pass  # no memory: a load is going to say so


def _threads() -> int:
    return min(_THREADS, os.cpu_count() or 1)


def _buffers(torch: Any, count: int, pinned: bool) -> list[Any]:
    return [torch.empty(_PART, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]


class DeviceLoad:
    """The tensors of one tree that are to be on a device."""

    def __init__(self, device: object) -> None:
        self._torch: Any = sys.modules["torch"]
        self._device = self._torch.device(device)
        self._parts: list[tuple[int, Any]] = []  # where in the region, and the bytes of a tensor
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def to_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return bool(self._device.type == "cuda")

    def place(self, at: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A tensor on the device, which `run` fills."""
        tensor = self._torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.numel():
            flat = tensor.reshape(-1).view(self._torch.uint8)
            self._parts += [(at + start, flat[start : start + _PART]) for start in range(0, len(flat), _PART)]
        return tensor

    def run_pinned(self, mapping: mmap.mmap) -> None:
        """Fill all tensors from a mapping that the driver knows; they are complete on return."""
        if not self._parts:
            return
        torch = self._torch
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())  # the memory of the tensors may still be in use
            with torch.cuda.stream(stream):
                for at, target in self._parts:
                    source = torch.frombuffer(mapping, dtype=torch.uint8, count=len(target), offset=at)
                    target.copy_(source, non_blocking=True)
            stream.synchronize()
        self._parts.clear()

    def run(self, fd: int, base: int) -> None:
        """Fill all tensors from the file; they are complete on return."""
        if not self._parts:
            return
        before = self._torch.cuda.current_stream(self._device) if self.to_cuda else None
        count = min(_threads(), len(self._parts))
        threads = [
            threading.Thread(target=self._work, args=(fd, base, before), name="phalanx-state-load")
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self, fd: int, base: int, before: Any) -> None:
        try:
            if before is None:
                self._copy(fd, base, None)
                return
            cuda = self._torch.cuda
            with cuda.device(self._device):
                stream = cuda.Stream()
                stream.wait_stream(before)  # the memory of the tensors may still be in use there
                with cuda.stream(stream):
                    self._copy(fd, base, stream)
                stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._error = error

    def _copy(self, fd: int, base: int, stream: Any) -> None:
        from ctypes import c_char  # torch offers the memory of a tensor through NumPy only

        torch = self._torch
        buffers = _buffers(torch, 2, stream is not None)
        events = [None if stream is None else torch.cuda.Event() for _ in buffers]
        turn = 0
        while self._error is None:
            with self._lock:
                if not self._parts:
                    return
                at, target = self._parts.pop()
            buffer, event = buffers[turn][: len(target)], events[turn]
            if event is not None:
                event.synchronize()
            view = memoryview((c_char * len(target)).from_address(buffer.data_ptr())).cast("B")
            done = 0
            while done < len(view):
                count = os.preadv(fd, [view[done:]], base + at + done)
                if not count:
                    raise EOFError("kept state is shorter than its index says")
                done += count
            target.copy_(buffer, non_blocking=stream is not None)
            if event is not None:
                event.record(stream)
            turn = 1 - turn
