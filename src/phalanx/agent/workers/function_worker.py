"""Functions as workers: passes a function, its arguments and its result between processes.

They are in anonymous memory files, not in pipes: any size, no deadlock, nothing on a disk. Pickles go only
from the agent to its own children and back. The worker's half is worker/function_call.py, which the worker
loads by path, without this package.
"""

from __future__ import annotations

import io
import marshal
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.errors import PhalanxError
from phalanx.kernel import anonymous_file
from phalanx.worker import bootstrap, function_call

if TYPE_CHECKING:
    from phalanx.helpers.messages import Place, WorkerLaunch
    from phalanx.helpers.zygote import Runner

_STREAMS = (
    ("stdin", 0, "r", None),
    ("stdout", 1, "w", None),
    ("stderr", 2, "w", "backslashreplace"),
)
_FIRST_EXTRA_FD = 20  # descriptors that multiprocessing objects in the arguments need


class RemoteError(PhalanxError):
    """Replaces a worker's exception that could not be pickled."""


class Parcel:
    """The pickled function and arguments of each rank, with the descriptors that they refer to."""

    def __init__(self, ranks: list[int]) -> None:
        self.entry_fd = -1
        self.places: dict[int, list[Place]] = {rank: [] for rank in ranks}
        self.boxes = {rank: anonymous_file("phalanx-box") for rank in ranks}

    def fill(self, entrypoint: Callable[..., object], args: dict[int, tuple[Any, ...]]) -> None:
        """Pickle everything; not needed for forks, which have it in memory."""
        collector = _Descriptors()
        entry = _pickle(entrypoint, collector, what="the entrypoint")
        shared = list(collector.places)
        self.entry_fd = anonymous_file("phalanx-function")
        _write(self.entry_fd, entry)
        for rank, arguments in args.items():
            collector.places = list(shared)
            data = _pickle(tuple(arguments), collector, what=f"the arguments of rank {rank}")
            _write(self.boxes[rank], marshal.dumps((_setting(collector), data)))
            self.places[rank] = list(collector.places)

    def fds(self, rank: int) -> list[Place]:
        """The worker's descriptors. A fork of this process gets its box under any number."""
        if self.entry_fd < 0:
            return [("box", self.boxes[rank], -1)]
        entry = ("entry", self.entry_fd, bootstrap.ENTRY_FD)
        return [entry, ("box", self.boxes[rank], bootstrap.BOX_FD), *self.places[rank]]

    def result(self, rank: int) -> tuple[bytes, Any]:
        """(b"R", value), (b"E", exception), or (b"", None) if the worker left nothing."""
        tag, value = unbox(self.boxes[rank])
        return (b"E", _recreated(*value)) if tag == b"P" else (tag, value)

    def close(self) -> None:
        for fd in (self.entry_fd, *self.boxes.values()):
            if fd >= 0:
                os.close(fd)
        self.entry_fd = -1
        self.boxes = {}


def unbox(fd: int) -> tuple[bytes, Any]:
    """The content of a worker's box; half-written counts as empty."""
    size = os.fstat(fd).st_size
    if size < 2:
        return b"", None
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as box:
        tag = box[:1]
        with memoryview(box) as view, view[1:] as body:
            try:
                # Trusted: from a child of this process, through a file that no other process can open.
                return tag, pickle.loads(body)
            except Exception as error:  # noqa: BLE001 - unpickling may raise anything
                return b"", RemoteError(f"cannot be unpickled here: {type(error).__name__}: {error}")


def _recreated(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """An exception from its parts, without a call of its __init__."""
    try:
        error = kind.__new__(kind, *args)
    except TypeError:
        error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


def runner() -> Runner:
    """For a fork server: runs one worker in a fork of the zygote."""
    import cloudpickle  # noqa: F401 - loaded once instead of in every worker

    def run(launch: WorkerLaunch, places: dict[str, int]) -> NoReturn:
        _clean_fork(launch.options, places)
        os._exit(function_call.run_function(launch.name, places["entry"], places["box"], vars(bootstrap)))

    return run


def fork_runner(entrypoint: Callable[..., object], args: dict[int, tuple[Any, ...]]) -> Runner:
    """For start method "fork": the function and arguments are in memory, not pickled."""

    def run(launch: WorkerLaunch, places: dict[str, int]) -> NoReturn:
        _clean_fork(launch.options, places)
        os._exit(
            function_call.finish(lambda: (entrypoint, args[launch.rank]), places["box"], vars(bootstrap))
        )

    return run


def _clean_fork(options: str, places: dict[str, int]) -> None:
    """Make a fork look like a fresh interpreter: new streams, no exit functions, default signals."""
    import atexit
    import signal

    atexit._clear()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, fd, mode, errors in _STREAMS:
        stream = open(fd, mode, closefd=False, buffering=-1 if fd == 0 else 1, errors=errors)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    bootstrap.prepare(options, places)
    if "phalanx.worker.api" in sys.modules:  # imported by the parent, for which there was no board to find
        sys.modules["phalanx.worker.api"]._connect()


class _Descriptors:
    """Assigns descriptor numbers, as multiprocessing expects from the process it is pickling for.

    Queues, locks, connections and shared tensors can be pickled only while such an object is registered as
    "the process being spawned".
    """

    def __init__(self) -> None:
        self.places: list[Place] = []

    @property
    def DupFd(self) -> Any:
        from multiprocessing.popen_spawn_posix import _DupFd

        return _DupFd

    def duplicate_for_child(self, fd: int) -> int:
        number = _FIRST_EXTRA_FD + len(self.places)
        self.places.append((f"extra{number}", fd, number))
        return number


def _pickle(value: object, collector: _Descriptors, what: str) -> bytes:
    spawning = "multiprocessing" in sys.modules
    if spawning:
        from multiprocessing.context import set_spawning_popen

        set_spawning_popen(collector)  # type: ignore[arg-type]  # it only calls duplicate_for_child
    try:
        places = list(collector.places)
        try:
            data = _dump(value, pickle.Pickler)
            if b"__main__" not in data:  # a reference would mean this process's main module
                return data
        except Exception:  # noqa: BLE001 - lambdas, closures …: cloudpickle may succeed
            pass
        collector.places = places
        import cloudpickle

        return _dump(value, cloudpickle.Pickler)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error
    finally:
        if spawning:
            set_spawning_popen(None)


def _dump(value: object, pickler: Any) -> bytes:
    buffer = io.BytesIO()
    reduction = sys.modules.get("multiprocessing.reduction")
    if reduction is not None:
        import copyreg
        from collections import ChainMap

        own = getattr(pickler, "dispatch_table", copyreg.dispatch_table)
        table = ChainMap({}, reduction.ForkingPickler._extra_reducers, own)
        # In the class: the C pickler reads it in its constructor, and ignores the instance.
        pickler = type("Pickler", (pickler,), {"dispatch_table": table})
    pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _setting(collector: _Descriptors) -> dict[str, Any]:
    setting: dict[str, Any] = {"path": list(sys.path), "argv": list(sys.argv)}
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        setting["authkey"] = bytes(process.current_process().authkey)
        tracker = sys.modules.get("multiprocessing.resource_tracker")
        fd = getattr(tracker._resource_tracker, "_fd", None) if tracker else None
        setting["tracker"] = collector.duplicate_for_child(fd) if fd is not None else None
    return setting


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
