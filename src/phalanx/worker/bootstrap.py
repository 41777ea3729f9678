"""The first code in a Python worker: it arranges for failures to be recorded, then runs the program.

Invariants
* The user's program sees `__main__`, sys.argv, sys.path and the rest as under `python script.py`.
* An uncaught exception is written to the error file without a decorator in the user's code, and the
  traceback on stderr contains no launcher frame. A crash leaves its stack through faulthandler.
* stdout is line-buffered (one write per line), so that lines reach the log when they are printed.
* A full disk under the logs does not disturb the worker: the bytes are counted as lost.

Loaded by _importlib_bootstrap.py outside of any package: only modules that the interpreter itself has loaded,
not even __future__, hence the quoted annotations.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
WORKER = "PHALANX_WORKER"
DEBUGGER = "PHALANX_DEBUGGER"  # as in agent/workers/debugger.py
STATE = "PHALANX_STATE"
REENTRY = "PHALANX_REENTRY"

_SAFE_PATH = getattr(sys.flags, "safe_path", sys.flags.isolated)  # Python 3.10 has only -I

ENTRY_FD = 10  # a function worker: the pickled function
BOX_FD = 11  # a function worker: its arguments, later replaced by its result
TALLY_FD = 12  # every worker: counts bytes that a full disk did not accept
_FDS = {"entry": ENTRY_FD, "box": BOX_FD, "tally": TALLY_FD}
_LAUNCHER_FILES = tuple(
    os.path.join(os.path.dirname(__file__), name)
    for name in ("bootstrap.py", "function_call.py", "_importlib_bootstrap.py")
)


def start() -> "Callable[[], object]":
    """Prepare to run `FILE MODE OPTIONS TARGET ARGS…`; returns a callable that runs the program.

    The callable adds no Python frame of its own to the stack.
    """
    mode, options, target, *args = sys.argv[1:]
    # First, so that no module is ever imported from this directory.
    if not _SAFE_PATH:  # with it, the interpreter does not add the directory
        del sys.path[0]
    sys.path_importer_cache.pop(sys.argv[0], None)
    if mode == "zygote":
        mode, options, target, args, places = _wait_as_zygote(options, target)
    else:
        places = _given_fds(mode, options)
    Guard.pid = os.getpid()
    prepare(options, places)
    _hook_imports(places)
    if mode == "function":
        os._exit(
            _load("worker.function_call")["run_function"](target, places["entry"], places["box"], globals())
        )
    _restore_orig_argv(mode, target, args)
    sys.argv = [target, *args]
    if mode == "script":
        return _script(target)
    if mode == "module":
        return _module(target)
    sys.argv[0] = "-c"
    return _code(target)


def _wait_as_zygote(options: str, root: str) -> "tuple[str, str, str, list[str], dict[str, int]]":
    """Run as a zygote; returns only in its forks, with the program to run."""
    modules = set(sys.modules)
    path = list(sys.path)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    sys.path.insert(0, root)
    from phalanx.helpers.fork_setup import restore_interpreter, show_title, title_setter
    from phalanx.helpers.keeper import close_others, main

    set_title = title_setter()
    fd, agent, *wishes = (int(word) for word in options.split(","))
    close_others(max([fd, *wishes]))
    worker = main(fd, agent, None, wishes[0] if wishes else None)
    program, standby = worker.launch.program, worker.standby
    assert program is not None
    restore_interpreter(path, modules)
    show_title(set_title, program, standby is not None)
    if standby is not None:  # it runs the program ahead of its rank (helpers/script_standby.py)
        standby.nice, standby.connect = nice, _become_worker
        standby.set_title = _bound(show_title, set_title, program, True)
        standby.offer()
    try:
        # A helper that prepares the next start in the background has a low priority; its workers have not.
        if standby is None and os.getpriority(os.PRIO_PROCESS, 0) != nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError:
        pass  # not permitted
    mode, target, args = program
    return mode, worker.launch.options, target, args, worker.places


def prepare(options: str, places: dict[str, int]) -> None:
    """Set up the connection to the launcher and the standard streams.

    `options` is "oe:16": which of stdout and stderr are log files, and this worker's offset in the tally.
    `places` are the launcher's descriptors; programs that the worker starts do not inherit them.
    """
    connect(options, places)
    streams = options.partition(":")[0]
    sys.stdout = sys.__stdout__ = _stream(sys.stdout, 1, "o" in streams)  # type: ignore[misc]  # intended
    sys.stderr = sys.__stderr__ = _stream(sys.stderr, 2, "e" in streams)  # type: ignore[misc]  # intended
    _attach_debugger()


def _become_worker(options: str, places: dict[str, int]) -> None:
    """A standby that runs the program has its rank now."""
    connect(options, places)
    _attach_debugger()
    _hook_imports(places)


def connect(options: str, places: dict[str, int]) -> None:
    """Set up what belongs to one incarnation of a worker: crash stacks, board and tally."""
    error_file = os.environ.get(ERROR_FILE)
    if error_file:
        stack = _catch_crashes(error_file + ".stack")
        if stack >= 0:
            places["stack"] = stack
    _attach_board(places)
    _attach_state(places)
    _attach_reentry(places)
    for fd in places.values():
        os.set_inheritable(fd, fd < 3)
    tally = options.partition(":")[2]
    if tally:
        Guard.tally = f"{places['tally']},{tally}"


def _attach_debugger() -> None:
    attach = os.environ.pop(DEBUGGER, "")
    if attach:  # the agent runs under a debugger that follows child processes
        exec(attach, {})


def _hook_imports(places: dict[str, int]) -> None:
    """Make JAX find its job, and torch the store; let torch be read; record what the program imports."""
    torch = "torch" in sys.modules or any(os.path.isdir(p + "/torch/distributed") for p in sys.path)
    store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if torch and (os.environ.get("PHALANX_COLLECTIVES") or store == "True"):
        _load("worker.torch_collectives")["offer"]()
    if store is not None and any(os.path.isdir(p + "/jax/_src") for p in sys.path):
        _load("worker.jax")["offer"]()  # JAX finds its job through a class, not through the environment
    if "learn" in places:
        sys.meta_path.insert(0, _load("helpers.preload.import_recorder")["ImportRecorder"](places["learn"]))


def _stream(old: "Any", fd: int, is_log: bool) -> "Any":
    """A text stream on `fd` that writes each line at once, in one piece.

    PYTHONUNBUFFERED has the same effect here: taken literally, it would write every fragment of a line
    separately, and the fragments of several workers would mix. -u is taken literally.
    """
    if old is None:  # started with the descriptor closed
        return old
    unbuffered = bool(getattr(old, "write_through", False))
    lines = not (unbuffered and "PYTHONUNBUFFERED" not in os.environ)
    if not is_log and (not unbuffered or not lines):
        old.reconfigure(line_buffering=lines or old.line_buffering)
        return old
    import _io  # not io: Python 3.14 has not imported it, and a script could tell

    old.flush()
    raw: Any = _log_file()(fd) if is_log else _io.FileIO(fd, "wb", closefd=False)
    raw.name = old.name
    # The same object: a package that was preloaded may have kept it (`from sys import stdout`).
    old.__init__(
        _io.BufferedWriter(raw) if lines else raw,
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=lines,
        write_through=not lines,
    )
    return old


def _given_fds(mode: str, options: str) -> dict[str, int]:
    """The descriptors that the agent placed; another one with such a number belongs to the user."""
    names = ["entry", "box"] * (mode == "function") + ["tally"] * (":" in options)
    return {name: _FDS[name] for name in names}


def _catch_crashes(path: str) -> int:
    faulthandler = _borrowed("faulthandler")
    if faulthandler.is_enabled():  # PYTHONFAULTHANDLER or -X: the user wants it on stderr
        return -1
    try:
        # A bare descriptor: a file object would be reported as unclosed at exit.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        faulthandler.enable(fd)
    except OSError:
        return -1
    return fd


def _attach_board(places: dict[str, int]) -> None:
    """Claim the heartbeat board (worker/board.py); a signal writes all stacks behind it."""
    try:
        board, bell, *file, sig = (int(word) for word in os.environ.get(WORKER, "").split(","))
        board, bell = places.get("board", board), places.get("bell", bell)
        if [os.fstat(board).st_dev, os.fstat(board).st_ino] != file:
            return  # inherited from a worker that started this process
        os.environ[WORKER] = f"{board},{bell},{file[0]},{file[1]},{sig}"
        places |= {"board": board, "bell": bell}
        os.pwrite(board, os.getpid().to_bytes(8, sys.byteorder), 8)
        os.pwrite(board, _borrowed("time").monotonic_ns().to_bytes(8, sys.byteorder), 192)  # start time
        os.lseek(board, 4096, os.SEEK_SET)
        _borrowed("faulthandler").register(sig, file=board, all_threads=True, chain=False)
        _shield(os.pread(board, 1, 58)[0])
    except (ValueError, OSError):
        pass  # no board


def _shield(preempt_signal: int) -> None:
    """Outlive an announcement that a scheduler sends to every process (agent/supervision/preemption.py).

    Through libc, so that a program that asks finds the default, and installs its handler as it would without
    this. Children inherit it. Signals that stop programs are left alone: `Pool.terminate` relies on SIGTERM.
    """
    if preempt_signal in (0, 1, 2, 3, 15) or _borrowed("_signal").getsignal(preempt_signal) != 0:
        return
    import ctypes

    ctypes.CDLL(None).signal(preempt_signal, ctypes.c_void_p(1))  # SIG_IGN


def _attach_state(places: dict[str, int]) -> None:
    """Find the file of kept state (agent/state/holder.py), which a fork has under another number."""
    try:
        file, bell, *rest = (int(word) for word in os.environ.get(STATE, "").split(","))
        file, bell = places.get("state", file), places.get("state-bell", bell)
        if [os.fstat(file).st_dev, os.fstat(file).st_ino] != rest[:2]:
            return  # inherited from a worker that started this process
        os.environ[STATE] = ",".join(map(str, (file, bell, *rest)))
        places |= {"state": file} | ({"state-bell": bell} if bell >= 0 else {})
    except (ValueError, OSError):
        pass  # no state is kept


def _attach_reentry(places: dict[str, int]) -> None:
    """Find the connection for re-entry (reentry/), and note where the launcher's descriptors are."""
    try:
        text = os.environ.get(REENTRY, "")
        link, device, inode, rest = text.split(",", 3)
        fd = places.get("reentry", int(link))
        if [os.fstat(fd).st_dev, os.fstat(fd).st_ino] != [int(device), int(inode)]:
            return  # inherited from a worker that started this process
        places["reentry"] = fd
        # With its inode: a program may close a descriptor, and get another file with this number.
        own = {name: number for name, number in places.items() if not name.isdigit() and name != "entry"}
        known = ";".join(f"{name}={number}:{os.fstat(number).st_ino}" for name, number in own.items())
        os.environ[REENTRY] = f"{fd},{device},{inode},{known},{rest}"
    except (ValueError, OSError):
        pass  # it cannot re-enter


def _borrowed(name: str) -> "Any":
    """Import a built-in module and leave sys.modules as it was for the program."""
    known = name in sys.modules
    module = __import__(name)
    if not known:
        del sys.modules[name]
    return module


def _log_file() -> "Any":
    """A raw file that does not raise if the disk is full."""
    import _io

    errno = _borrowed("errno")
    full = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

    class LogFile(_io.FileIO):
        def __init__(self, fd: int) -> None:
            super().__init__(fd, "wb", closefd=False)

        def write(self, data: "Any") -> int:
            try:
                return super().write(data) or 0
            except OSError as error:
                if error.errno not in full:
                    raise
            size = memoryview(data).nbytes
            _count_lost(Guard.tally, self.fileno(), size)
            return size

    return LogFile


def _count_lost(tally: str, stream: int, size: int) -> None:
    """Add to this worker's counter in the agent's memory file."""
    try:
        fd, offset = (int(part) for part in tally.split(","))
        offset += 8 * (stream - 1)
        total = int.from_bytes(os.pread(fd, 8, offset), "little") + size
        os.pwrite(fd, total.to_bytes(8, "little"), offset)
    except (ValueError, OSError):
        pass


# -- programs -------------------------------------------------------------------------------------


def _add_first_path(directory: str) -> None:
    if not _SAFE_PATH:
        sys.path.insert(0, directory)


def _restore_orig_argv(mode: str, target: str, args: list[str]) -> None:
    """Set sys.orig_argv as if the interpreter had run the program directly."""
    head = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv)]
    word = {"script": [target], "module": ["-m", target], "code": ["-c", target]}[mode]
    sys.orig_argv = [*head, *word, *args]


def _fresh_main(loader: object, file: str | None) -> "dict[str, Any]":
    """Reset `__main__`, until now the bootstrap, to what the interpreter creates."""
    space = sys.modules["__main__"].__dict__
    # Kept rather than listed: the names depend on the version of Python.
    dunders = {name: value for name, value in space.items() if name.startswith("__")}
    space.clear()
    space.update(dunders, __loader__=loader)
    if file is None:
        for name in ("__file__", "__cached__"):
            space.pop(name, None)
    else:
        space["__file__"] = file
    return space


def _bound(function: "Callable[..., object]", *args: object) -> "Callable[[], object]":
    """A call as an object; no argument may be None. Not functools.partial: its module may not be loaded."""
    method: Any = type(Guard().__enter__)
    for arg in args:
        function = method(function, arg)
    return function


def _frozen() -> "Any":
    """importlib's machinery, which exists before the first import."""
    return sys.modules["_frozen_importlib_external"]


def _script(path: str) -> "Callable[[], object]":
    full = _full_path(path)
    if _frozen().PathFinder._path_importer_cache(full) is not None:  # a directory or a zip file
        sys.path.insert(0, full)
        return _main_module("__main__", False)
    _add_first_path(os.path.dirname(os.path.realpath(path)))
    import _io

    try:
        with _io.open_code(full) as file:
            data = file.read()
    except OSError as error:
        error.__traceback__ = None  # the error is recorded; these frames tell nothing
        # The interpreter's own message and exit code.
        sys.stderr.write(f"{sys.orig_argv[0]}: can't open file {full!r}: {str(error).partition(': ')[0]}\n")
        sys.exit(2)
    if full.endswith(".pyc") or data.startswith(_frozen().MAGIC_NUMBER):
        space = _fresh_main(_frozen().SourcelessFileLoader("__main__", full), full)
        return _bound(exec, _frozen()._compile_bytecode(memoryview(data)[16:]), space)
    space = _fresh_main(_frozen().SourceFileLoader("__main__", full), full)
    return _bound(exec, compile(data, full, "exec", dont_inherit=True), space)


def _full_path(path: str) -> str:
    try:
        return os.path.join(os.getcwd(), path)
    except OSError:  # the directory was deleted
        return path


def _module(name: str) -> "Callable[[], object]":
    _add_first_path(os.getcwd())
    sys.argv[0] = "-m"
    return _main_module(name, True)


def _main_module(name: str, alter_argv: bool) -> "Callable[[], object]":
    import runpy

    _fresh_main(sys.modules["_frozen_importlib"].BuiltinImporter, None)
    # The function that the interpreter calls for -m; there is no public equivalent.
    return _bound(runpy._run_module_as_main, name, alter_argv)  # type: ignore[attr-defined]


def _code(text: str) -> "Callable[[], object]":
    _add_first_path("")
    space = _fresh_main(sys.modules["_frozen_importlib"].BuiltinImporter, None)
    if sys.version_info >= (3, 13):  # tracebacks show the text of -c
        import linecache

        lines = [line + "\n" for line in text.splitlines()]
        linecache.cache["<string>"] = (len(text), None, lines, "<string>")
    return _bound(exec, compile(text, "<string>", "exec", dont_inherit=True), space)


class Guard:
    """Runs around the program: records what it raises; the interpreter then exits as usual."""

    pid = 0  # of the worker; set in start()
    tally = ""  # where lost bytes are counted: descriptor and offset; set in connect()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        # A child that the program forked may arrive here too; its error is not the worker's.
        own = os.getpid() == self.pid
        if isinstance(error, SystemExit):
            if own and error.code:
                record(error, "write_exit")
            return
        error.__traceback__ = _without_launcher(error.__traceback__)
        if own and not isinstance(error, KeyboardInterrupt):
            record(error)
        # The interpreter calls this hook with the bootstrap's frame added to the traceback.
        sys.excepthook = _hook_without_launcher(getattr(sys, "excepthook", sys.__excepthook__))


def _hook_without_launcher(theirs: "Callable[..., object]") -> "Callable[..., None]":
    def excepthook(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
        sys.excepthook = theirs
        trace = error.__traceback__ = sys.last_traceback = _without_launcher(trace)
        try:
            with _InOnePiece():
                theirs(kind, error, trace)
        except SystemExit:
            raise
        except BaseException as another:  # noqa: BLE001 - printed as the interpreter does
            another.__traceback__ = _without_launcher(another.__traceback__)
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(another), another, another.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(kind, error, trace)

    return excepthook


class _InOnePiece:
    """stderr writes what it gets meanwhile at once: tracebacks of several workers must not mix."""

    def __enter__(self) -> None:
        self._stream = stream = sys.stderr
        self._lines = getattr(stream, "line_buffering", False) and hasattr(stream, "reconfigure")
        if self._lines:
            stream.reconfigure(line_buffering=False)  # type: ignore[union-attr]

    def __exit__(self, *_: object) -> None:
        if self._lines:
            self._stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # which also flushes


def _without_launcher(trace: "TracebackType | None") -> "TracebackType | None":
    while trace is not None and trace.tb_frame.f_code.co_filename in _LAUNCHER_FILES:
        trace = trace.tb_next
    return trace


def record(error: BaseException, how: str = "write_exception", **more: int) -> None:
    """Write the error file, if the worker has one; never raises."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    theirs = sys.path
    # A json.py beside the user's script must not run here.
    sys.path = [os.path.dirname(os.__file__), *theirs]
    try:
        _load("worker.error_file")[how](path, error, **more)
    except Exception:  # noqa: BLE001 - the user's own error must stay visible
        pass
    finally:
        sys.path = theirs


def _load(name: str) -> "dict[str, Any]":
    """A module of this package, by path: `phalanx` may not be importable with the user's sys.path."""
    path = os.path.join(os.path.dirname(os.path.dirname(__file__)), *name.split(".")) + ".py"
    space: dict[str, Any] = {"__name__": "phalanx." + name, "__file__": path}
    exec(_frozen().SourceFileLoader(name, path).get_code(name), space)
    return space
