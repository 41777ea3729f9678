"""The first code that runs inside a Python worker: it records how the worker fails, then steps aside.

What it must hold:
* The user's program sees `__main__`, sys.argv, sys.path and the rest as under `python script.py`.
* An uncaught exception is written to the error file with no decorator in the user's code, and the
  traceback on stderr shows no frame of ours. A crash leaves its stack through faulthandler.
* stdout is line-buffered (one write per line), so that lines reach the log when they are printed.
* A full disk under the logs is not the worker's problem: the bytes are counted as lost and it goes on.

Loaded by _bootstrap.py outside of any package: standard library only, and as little of it as possible.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

ENTRY_FD = 10  # a function worker finds the pickled function here,
BOX_FD = 11  # its arguments here, and leaves its return value in their place
TALLY_FD = 12  # and every worker counts here what a full disk did not take
_FDS = {"entry": ENTRY_FD, "box": BOX_FD, "tally": TALLY_FD}
_keep: list[object] = []  # the crash file must stay open as long as the process


def main() -> None:
    """Called by _bootstrap.py: `_bootstrap.py MODE OPTIONS TARGET ARGS…`."""
    mode, options, target, *args = sys.argv[1:]
    sys.orig_argv = _original_argv(mode, target, args)
    prepare(options)
    if mode == "function":
        os._exit(run_function(target))
    sys.argv = [target, *args]
    if mode == "script":
        _guarded(lambda: _run_script(target))
    elif mode == "module":
        _guarded(lambda: _run_module(target))
    else:
        sys.argv = ["-c", *args]
        _guarded(lambda: _run_code(target))


def prepare(options: str, places: dict[str, int] | None = None) -> None:
    """Crash stacks into a file, and streams that suit a log file.

    `options` is "oe:16": which of stdout and stderr are log files, and our place in the tally.
    """
    error_file = os.environ.get(ERROR_FILE)
    if error_file:
        _catch_crashes(error_file + ".stack")
    streams, _, tally = options.partition(":")
    if places is None:
        places = {name: fd for name, fd in _FDS.items() if _is_open(fd)}
    for fd in places.values():
        os.set_inheritable(fd, fd < 3)
    if tally:
        tally = f"{places['tally']},{tally}"
    if "o" in streams:
        sys.stdout = sys.__stdout__ = _log_stream(sys.stdout, 1, tally)  # type: ignore[misc]  # as intended
    elif sys.stdout is not None and not _is_unbuffered(sys.stdout):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper here
    if "e" in streams:
        sys.stderr = sys.__stderr__ = _log_stream(sys.stderr, 2, tally)  # type: ignore[misc]  # as intended


def _is_unbuffered(stream: Any) -> bool:
    """Whether the user asked for it, with -u or PYTHONUNBUFFERED."""
    return bool(getattr(stream, "write_through", False))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _catch_crashes(path: str) -> None:
    import faulthandler

    if faulthandler.is_enabled():  # PYTHONFAULTHANDLER or -X: the user wants it on stderr
        return
    try:
        stack = open(path, "w")  # noqa: SIM115 - it stays open until the process ends
    except OSError:
        return
    faulthandler.enable(file=stack)
    _keep.append(stack)


def _log_stream(old: Any, fd: int, tally: str) -> Any:
    """A text stream on `fd` that never raises for a disk that is full."""
    import io
    from errno import EDQUOT, EIO, ENOSPC

    class LogFile(io.FileIO):
        def write(self, data: Any) -> int:
            try:
                return super().write(data) or 0
            except OSError as error:
                if error.errno not in (ENOSPC, EDQUOT, EIO):
                    raise
            size = memoryview(data).nbytes
            _count_lost(tally, fd, size)
            return size

    if old is None:  # started with the descriptor closed
        return old
    old.flush()
    raw = LogFile(fd, "wb", closefd=False)
    raw.name = old.name
    unbuffered = _is_unbuffered(old)
    buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
    stream = io.TextIOWrapper(
        buffer,
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=not unbuffered,
        write_through=unbuffered,
    )
    stream.mode = "w"  # type: ignore[misc]  # as the interpreter's own streams have it
    return stream


def _count_lost(tally: str, stream: int, size: int) -> None:
    """Add to this worker's counter in the agent's memory file, which no disk can fill."""
    try:
        fd, offset = (int(part) for part in tally.split(","))
        offset += 8 * (stream - 1)
        total = int.from_bytes(os.pread(fd, 8, offset), "little") + size
        os.pwrite(fd, total.to_bytes(8, "little"), offset)
    except (ValueError, OSError):
        pass


# -- programs -------------------------------------------------------------------------------------


def _original_argv(mode: str, target: str, args: list[str]) -> list[str]:
    """sys.orig_argv without our own words in it."""
    if mode == "function":
        return sys.orig_argv
    own = len(sys.argv)
    head = sys.orig_argv[: len(sys.orig_argv) - own]
    word = {"script": [target], "module": ["-m", target], "code": ["-c", target]}[mode]
    return [*head, *word, *args]


def _fresh_main(loader: object, file: str | None) -> dict[str, Any]:
    """Empty `__main__`, which is _bootstrap.py until now, and dress it as the interpreter would."""
    import builtins

    space = sys.modules["__main__"].__dict__
    space.clear()
    space.update(
        __name__="__main__",
        __doc__=None,
        __package__=None,
        __loader__=loader,
        __spec__=None,
        __annotations__={},
        __builtins__=builtins,
    )
    if file is not None:
        space.update(__file__=file, __cached__=None)
    return space


def _set_first_path(directory: str) -> None:
    if not sys.flags.safe_path:  # else the interpreter put nothing there that we could replace
        sys.path[0] = directory


def _run_script(path: str) -> None:
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    full = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    source_loader = sys.modules["_frozen_importlib_external"].SourceFileLoader
    space = _fresh_main(source_loader("__main__", full), full)
    import io

    with io.open_code(full) as file:
        source = file.read()
    exec(compile(source, full, "exec", dont_inherit=True), space)


def _run_module(name: str) -> None:
    import runpy

    _set_first_path(os.getcwd())
    _fresh_main(None, None)
    sys.argv[0] = "-m"
    # The function the interpreter itself calls for -m; there is no public one with its behaviour.
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]


def _run_code(text: str) -> None:
    _set_first_path("")
    builtin_importer = sys.modules["_frozen_importlib"].BuiltinImporter
    exec(compile(text, "<string>", "exec", dont_inherit=True), _fresh_main(builtin_importer, None))


def _guarded(run: Callable[[], None]) -> None:
    """Run the program; record what it raises; let the interpreter end as it always would."""
    try:
        run()
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        error.__traceback__ = _without_us(error.__traceback__)
        if not isinstance(error, KeyboardInterrupt):
            record(error)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        # Shown already, without our frames; the re-raise is for the exit status alone.
        sys.excepthook = lambda *_: None
        raise


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return trace


def record(error: BaseException) -> None:
    """Write the error file, if there is one to write; never raises."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    try:
        _error_file()["write_exception"](path, error)
    except Exception:  # noqa: BLE001 - the user's own error must stay the one that is seen
        pass


def _error_file() -> dict[str, Any]:
    """error_file.py, loaded by its place: `phalanx` may not be importable under the user's sys.path."""
    path = os.path.join(os.path.dirname(__file__), "error_file.py")
    name = "phalanx.processes.error_file"
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader(name, path)
    space: dict[str, Any] = {"__name__": name, "__file__": path}
    # Dataclasses look their module up by name while they are made.
    import types

    module = types.ModuleType(name)
    absent = name not in sys.modules
    module.__dict__.update(space)
    if absent:
        sys.modules[name] = module
    try:
        exec(loader.get_code(name), module.__dict__)
    finally:
        if absent:
            sys.modules.pop(name, None)
    return module.__dict__


# -- functions ------------------------------------------------------------------------------------


def run_function(name: str) -> int:
    """Run the function that the agent left in our descriptors; returns the exit status."""
    import marshal

    entry_data = _whole(ENTRY_FD)
    setting, arguments = marshal.loads(_whole(BOX_FD))
    os.close(ENTRY_FD)
    sys.path[:] = setting["path"]
    sys.argv = setting["argv"]
    _fresh_main(None, None)
    _join_multiprocessing(setting, name)

    def unpack() -> tuple[Callable[..., object], tuple[object, ...]]:
        import pickle

        return pickle.loads(entry_data), pickle.loads(arguments)

    return finish(unpack, BOX_FD)


def _whole(fd: int) -> bytes:
    """All of a file, by offset: ranks share the descriptor's position, and a read gives 2 GiB at most."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, size, 0)
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return data


def _join_multiprocessing(setting: dict[str, Any], name: str) -> None:
    """Let queues, locks and shared memory of the parent work here as in multiprocessing's own children."""
    key, tracker = setting.get("authkey"), setting.get("tracker")
    if key is None:
        return
    from multiprocessing import process, resource_tracker

    process.current_process().authkey = key
    process.current_process().name = name
    if tracker is not None:
        resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]


def finish(unpack: Callable[[], tuple[Callable[..., object], tuple[object, ...]]], box: int) -> int:
    """Call, leave the return value or the exception in the box, run the exit functions: the status."""
    import atexit

    status = 0
    try:
        function, arguments = unpack()
        _leave(box, b"R", function(*arguments))
    except SystemExit as stop:
        status = _exit_status(stop.code)
        if status == 0:
            _leave(box, b"R", None)
    except BaseException as error:  # noqa: BLE001 - reported in full, here and in the error file
        status = 1
        error.__traceback__ = _without_us(error.__traceback__)
        record(error)
        _leave_error(box, error)
        sys.excepthook(type(error), error, error.__traceback__)
    try:
        import threading

        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter: wait for its threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except BaseException as error:  # noqa: BLE001 - an exit function failed: the result stands
        sys.excepthook(type(error), error, error.__traceback__)
    return status


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _leave(fd: int, tag: bytes, value: object) -> None:
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


def _cloud_dump(value: object, file: Any, protocol: int) -> None:
    import cloudpickle  # type: ignore[import-untyped]

    cloudpickle.dump(value, file, protocol=protocol)


def _leave_error(box: int, error: BaseException) -> None:
    try:
        _leave(box, b"E", error)
    except TypeError:
        pass  # the traceback in the error file has to do
