"""Trees as raw arrays and a small pickle: arrays are copied as they are, everything else is pickled.

    data     the arrays, one after the other, aligned
    index    the number of buffers, offset and size of each, then the pickle

A torch tensor (on any device) or a JAX array is replaced in the pickle by its place in the data. NumPy
arrays, and whatever else offers its memory to pickle, become out-of-band buffers. Reading maps the data:
arrays that come back are views of the mapping, and no byte is copied before it is used.

The pickle is made and read by workers of the same user. The agent, which may copy it to another node or to
disk, never reads it.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from typing import Any

    from phalanx.worker.state.device_load import DeviceLoad

_ALIGN = 64
_PAGE = 4096
_LARGE = 1 << 20
_COUNT = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")


class EncodedTree:
    """A tree that is ready to be copied: where each array goes, and the index."""

    def __init__(self) -> None:
        self.size = 0  # of the data
        self.index = b""
        self.tensors: list[tuple[int, Any]] = []  # torch: offset, tensor
        self.buffers: list[tuple[int, Any]] = []  # offset, contiguous bytes
        self._known: dict[tuple[object, ...], tuple[object, ...]] = {}

    @property
    def used(self) -> int:
        return self.size + len(self.index)

    def place(self, size: int) -> int:
        """Room for an array."""
        step = _PAGE if size >= _LARGE else _ALIGN
        at = -(-self.size // step) * step
        self.size = at + size
        return at

    def add_tensor(self, torch: Any, tensor: Any) -> tuple[object, ...] | None:
        """The description of a tensor; None if pickle must handle it."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            return None
        parameter = type(tensor) is not torch.Tensor
        trained = tensor.requires_grad
        tensor = tensor.detach().resolve_conj().resolve_neg()
        order = _memory_order(tensor)
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        found = self._known.get(key) if tensor.numel() else None
        if found is None:
            size = tensor.numel() * tensor.element_size()
            at = self.place(size)
            if size:
                self.tensors.append((at, tensor if order is None else tensor.permute(order)))
            found = self._known[key] = (
                "torch",
                at,
                str(tensor.dtype).partition(".")[2],
                *_shape(tensor, order),
            )
        return (*found, trained, parameter, tensor.is_cuda)

    def add_array(self, kind: str, array: Any) -> tuple[object, ...]:
        """The description of a NumPy array that stands for another kind."""
        import numpy

        array = numpy.ascontiguousarray(array).reshape(array.shape)  # the former makes scalars 1-dimensional
        at = self.place(array.nbytes)
        if array.nbytes:
            self.buffers.append((at, memoryview(array.reshape(-1).view(numpy.uint8))))
        return kind, at, array.dtype, array.shape

    def write(self, mapping: mmap.mmap) -> None:
        """Copy the arrays of this process's memory, and the index."""
        view = memoryview(mapping)
        try:
            for at, data in self.buffers:
                view[at : at + data.nbytes] = data
            view[self.size : self.used] = self.index
        finally:
            view.release()


def encode(tree: object) -> EncodedTree:
    """Lay a tree out; nothing is copied yet. Raises what pickle raises for what cannot be pickled."""
    result = EncodedTree()
    places: list[tuple[int, int]] = []

    def take(buffer: pickle.PickleBuffer) -> None:
        data = buffer.raw()
        at = result.place(data.nbytes)
        places.append((at, data.nbytes))
        if data.nbytes:
            result.buffers.append((at, data))

    text = io.BytesIO()
    _TreePickler(text, result, take).dump(tree)
    table = b"".join(_PLACE.pack(*place) for place in places)
    result.place(0)
    result.index = _COUNT.pack(len(places)) + table + text.getbuffer()
    return result


def decode(mapping: mmap.mmap, index_at: int, index_size: int, load: DeviceLoad | None = None) -> object:
    """The tree, with arrays that are views of the mapping; `load` places what was on a device."""
    view = memoryview(mapping)
    index = view[index_at : index_at + index_size]
    (count,) = _COUNT.unpack_from(index)
    start = _COUNT.size + count * _PLACE.size
    places = _PLACE.iter_unpack(index[_COUNT.size : start])
    buffers = [view[at : at + size] for at, size in places]
    tree: object = _TreeUnpickler(io.BytesIO(index[start:]), buffers, mapping, load).load()
    torch: Any = sys.modules.get("torch._utils")
    if hasattr(torch, "_validate_loaded_sparse_tensors"):
        torch._validate_loaded_sparse_tensors()  # torch holds on to sparse tensors until they are checked
    return tree


class _TreePickler(pickle.Pickler):
    """Replaces tensors by their places."""

    def __init__(
        self, file: io.BytesIO, result: EncodedTree, take: Callable[[pickle.PickleBuffer], None]
    ) -> None:
        super().__init__(file, 5, buffer_callback=take)
        self._result = result
        torch: Any = sys.modules.get("torch")
        self._torch = torch if hasattr(torch, "nn") else None  # not one that is being imported
        self._tensors = () if self._torch is None else (self._torch.Tensor, self._torch.nn.Parameter)
        jax: Any = sys.modules.get("jax")
        self._jax_array: Any = getattr(jax, "Array", None)
        self._jax = jax

    def persistent_id(self, obj: Any) -> object:
        if type(obj) in self._tensors:
            return self._result.add_tensor(self._torch, obj)
        if self._jax_array is not None and isinstance(obj, self._jax_array):
            return self._add_jax(obj)
        return None

    def _add_jax(self, array: Any) -> object:
        if isinstance(array, self._jax.core.Tracer) or self._jax.dtypes.issubdtype(
            array.dtype, self._jax.dtypes.prng_key
        ):
            return None
        if not array.is_fully_addressable:
            raise ValueError(
                f"a JAX array of shape {array.shape} has parts on other hosts: "
                "keep what is here, array.addressable_shards"
            )
        import numpy

        return self._result.add_array("jax", numpy.asarray(array))


class _TreeUnpickler(pickle.Unpickler):
    """Replaces places by views of the mapping."""

    def __init__(
        self, file: io.BytesIO, buffers: list[memoryview], mapping: mmap.mmap, load: DeviceLoad | None
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._mapping = mapping
        self._load = load
        self._placed: dict[tuple[int, str], Any] = {}  # on the device, by place and type

    def persistent_load(self, pid: Any) -> object:
        if pid[0] == "torch":
            return self._tensor(*pid[1:])
        _, at, dtype, shape = pid
        import jax.numpy
        import numpy

        count = 1
        for extent in shape:
            count *= extent
        if not count:
            return jax.numpy.zeros(shape, dtype)
        return jax.numpy.asarray(numpy.frombuffer(self._mapping, dtype, count, at).reshape(shape))

    def _tensor(
        self,
        at: int,
        dtype: str,
        shape: tuple[int, ...],
        order: tuple[int, ...] | None,
        trained: bool,
        parameter: bool,
        cuda: bool,
    ) -> object:
        import torch

        if cuda and self._load is not None:
            if (at, dtype) not in self._placed:  # two references to the same tensor stay one
                self._placed[at, dtype] = self._load.place(at, getattr(torch, dtype), shape)
            tensor = self._placed[at, dtype].detach()
        else:
            tensor = torch_view(torch, self._mapping, at, getattr(torch, dtype), shape)
        if order is not None:
            tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
        if parameter:
            return torch.nn.Parameter(tensor, requires_grad=trained)
        return tensor.requires_grad_(trained) if trained else tensor


def torch_view(torch: Any, mapping: mmap.mmap, at: int, dtype: Any, shape: tuple[int, ...]) -> Any:
    count = 1
    for extent in shape:
        count *= extent
    if not count:
        return torch.empty(shape, dtype=dtype)
    size = count * dtype.itemsize
    flat = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=at)
    return flat.view(dtype).view(shape)


def _memory_order(tensor: Any) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is contiguous; None: its own, or there is none."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
    return order if tensor.permute(order).is_contiguous() else None


def _shape(tensor: Any, order: tuple[int, ...] | None) -> tuple[object, object]:
    shape = tuple(tensor.shape)
    return (shape, None) if order is None else (tuple(shape[d] for d in order), order)
