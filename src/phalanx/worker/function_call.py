"""Runs a function as a worker: unpickles it, calls it, and puts the result into the agent's memory file.

The worker's half of agent/workers/function_worker.py. A module of its own, because the worker loads it by
path like bootstrap.py, without the package: standard library only, quoted annotations.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def run_function(name: str, entry: int, box: int, child: "dict[str, Any]") -> int:
    """Run the function in these descriptors; returns the exit status. `child`: the names of bootstrap.py."""
    import marshal

    entry_data = _whole(entry)
    setting, arguments = marshal.loads(_whole(box))
    os.close(entry)
    sys.path[:] = setting["path"]
    sys.argv = setting["argv"]
    child["_fresh_main"](None, None)
    _join_multiprocessing(setting, name)

    def unpack() -> "tuple[Callable[..., object], tuple[object, ...]]":
        import pickle

        return pickle.loads(entry_data), pickle.loads(arguments)

    return finish(unpack, box, child)


def _whole(fd: int) -> bytes:
    """A whole file, by offset: ranks share the descriptor's position, and a read returns at most 2 GiB."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, size, 0)
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return data


def _join_multiprocessing(setting: "dict[str, Any]", name: str) -> None:
    """Make the parent's queues, locks and shared memory work as in multiprocessing's own children."""
    key, tracker = setting.get("authkey"), setting.get("tracker")
    if key is None:
        return
    from multiprocessing import process, resource_tracker

    process.current_process().authkey = key
    process.current_process().name = name
    if tracker is not None:
        resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]


def finish(
    unpack: "Callable[[], tuple[Callable[..., object], tuple[object, ...]]]",
    box: int,
    child: "dict[str, Any]",
) -> int:
    """Call the function, store its result or exception in the box, run exit functions; returns the status."""
    import atexit
    import time

    status = 0
    try:
        function, arguments = unpack()
        _store(box, b"R", function(*arguments))
    except SystemExit as stop:
        status = _exit_status(stop.code)
        if status == 0:
            _store(box, b"R", None)
        else:
            child["record"](stop, "write_exit")
    except BaseException as error:  # noqa: BLE001 - reported in full, here and in the error file
        status = 1
        raised_ns = time.time_ns()
        error.__traceback__ = child["_without_launcher"](error.__traceback__)
        # The record makes this rank a failure. It comes last: a stop because another rank has failed may end
        # this process at any moment.
        _store_error(box, error)
        child["record"](error, now_ns=raised_ns)
        with child["_InOnePiece"]():
            sys.excepthook(type(error), error, error.__traceback__)
    try:
        import threading

        threading._shutdown()  # type: ignore[attr-defined]  # like the interpreter: wait for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except BaseException as error:  # noqa: BLE001 - an exit function failed: the result is still valid
        sys.excepthook(type(error), error, error.__traceback__)
    return status


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _store(fd: int, tag: bytes, value: object) -> None:
    import pickle

    with open(fd, "wb", closefd=False) as box:
        for dump in (pickle.dump, _cloud_dump):
            box.seek(0)
            box.truncate()
            box.write(tag)
            try:
                dump(value, box, protocol=pickle.HIGHEST_PROTOCOL)
                return
            except Exception as error:  # noqa: BLE001 - pickling may raise anything
                failure = error
        box.seek(0)
        box.truncate()
    raise TypeError(
        f"the return value of this rank cannot be pickled: {type(value).__name__}: {failure}"
    ) from failure


def _cloud_dump(value: object, file: "Any", protocol: int) -> None:
    import cloudpickle

    cloudpickle.dump(value, file, protocol=protocol)


def _store_error(box: int, error: BaseException) -> None:
    """Store an exception whole (tag E) if it unpickles, else (tag P) its type, arguments and attributes.

    Many exceptions cannot be recreated from their arguments, as pickle does.
    """
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
        return _store(box, b"E", error)
    except Exception:  # noqa: BLE001 - user classes may raise anything
        pass
    for arguments, rest in ((error.args, vars(error)), ((str(error),), {})):
        try:
            return _store(box, b"P", (type(error), arguments, rest))
        except TypeError:
            pass  # the error file still has the traceback
    return None
