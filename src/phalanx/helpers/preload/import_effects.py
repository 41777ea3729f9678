"""The settings of the process and the interpreter that an import may change.

A worker is a fork of a process that has done the imports. Most of what an import leaves behind is memory, and
a fork keeps it. Settings (signal handlers, sys.path, hooks, the locale, ...) are different: some do not
survive the way into a worker, and others would be in effect before the script's first line, where the
script may set them, too. A package that changes one of them is not preloaded.

What only adds to a list (warning filters, finders, exit functions, loggers other than the root logger) is
kept: the worker has it from its first line on.

    with as_in_a_script():
        state = ImportState()
        ... import ...
        why = state.changed()   # "" or a reason; the next call compares with this moment

It takes less than 100 µs.
"""

from __future__ import annotations

import _locale  # built in, as the next one
import gc
import os
import sys

from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# The helpers ignore these or have handlers of their own (keeper.py); a script finds the defaults.
_HELD = tuple(
    getattr(signal, f"SIG{name}")
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "ALRM", "TSTP", "CHLD")
)


class ImportState:
    """The settings at one moment."""

    __slots__ = ("_handlers", "_values")

    def __init__(self) -> None:
        self._values = [read() for _, read in _SETTINGS]
        self._handlers = _handlers()

    def changed(self) -> str:
        """What was changed since the last call: the reason why a package is not preloaded, or ''."""
        why = ""
        for place, (what, read) in enumerate(_SETTINGS):
            now = read()
            if now != self._values[place]:
                self._values[place] = now
                why = why or what
        handlers = _handlers()
        for number, before, after in zip(_NUMBERS, self._handlers, handlers, strict=True):
            if before is not after and before != after:
                why = why or f"sets a handler of {_signal_name(number)}"
        self._handlers = handlers
        return why


# ---- settings ------------------------------------------------------------------------------------
#
# Each is read without importing anything. That of a module that is not loaded has its default value: the
# module may be loaded, and the setting changed, by one and the same import.


class _Same:
    """Objects that are compared by identity, and kept alive meanwhile."""

    __slots__ = ("_objects",)

    def __init__(self, *objects: Any) -> None:
        self._objects = objects

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or len(self._objects) != len(other._objects):
            return False
        return all(one is two for one, two in zip(self._objects, other._objects, strict=True))

    __hash__ = None  # type: ignore[assignment]  # never a key


def _namespace(module: str) -> dict[str, Any]:
    return {**vars(sys.modules[module]), "__warningregistry__": None}  # filled by any warning


def _threading_hooks() -> _Same:
    threading: Any = sys.modules.get("threading")
    if threading is None or not hasattr(threading, "_profile_hook"):  # not loaded, or not yet all of it
        return _Same(None, None, None)
    own = getattr(threading, "excepthook", None)
    standard = own is getattr(threading, "__excepthook__", own)
    return _Same(None if standard else own, threading._trace_hook, threading._profile_hook)


def _root_logger() -> tuple[Any, ...]:
    logging: Any = sys.modules.get("logging")
    root = getattr(logging, "root", None)
    if root is None:
        return 30, 0, _Same(), _Same()
    return root.level, root.manager.disable, _Same(*root.handlers), _Same(*root.filters)


def _log_classes() -> _Same:
    logging: Any = sys.modules.get("logging")
    made = getattr(logging, "_logRecordFactory", None)
    standard = made is None or made is getattr(logging, "LogRecord", None)
    return _Same(None if standard else made)


def _showwarning() -> _Same:
    warnings: Any = sys.modules.get("warnings")
    shown = getattr(warnings, "showwarning", None)
    return _Same(None if shown is getattr(warnings, "_showwarning_orig", None) else shown)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return ""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _limits() -> bytes:
    try:
        fd = os.open("/proc/self/limits", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 8192)
    finally:
        os.close(fd)


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SETTINGS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("edits sys.path", lambda: list(sys.path)),
    ("keeps sys.argv", lambda: (sys.getrefcount(sys.argv), sys.getrefcount(sys.orig_argv))),
    ("replaces sys.argv", lambda: (id(sys.argv), id(sys.orig_argv))),  # as_in_a_script keeps them alive
    ("replaces sys.stdin, sys.stdout or sys.stderr", lambda: _Same(sys.stdin, sys.stdout, sys.stderr)),
    ("sets sys.excepthook", lambda: _Same(sys.excepthook)),
    ("sets sys.unraisablehook", lambda: _Same(sys.unraisablehook)),
    ("sets sys.displayhook", lambda: _Same(sys.displayhook)),
    ("sets sys.breakpointhook", lambda: _Same(sys.breakpointhook)),
    ("sets a trace or profile function", lambda: _Same(sys.gettrace(), sys.getprofile())),
    ("sets hooks of threading", _threading_hooks),
    ("sets the recursion limit", sys.getrecursionlimit),
    ("sets the switch interval", sys.getswitchinterval),
    ("sets the limit of int digits", lambda: getattr(sys, "get_int_max_str_digits", int)()),
    ("sets the dlopen flags", lambda: getattr(sys, "getdlopenflags", int)()),
    ("sets hooks of async generators", lambda: _Same(*sys.get_asyncgen_hooks())),
    ("sets sys.dont_write_bytecode", lambda: (sys.dont_write_bytecode, sys.pycache_prefix)),
    ("changes builtins", lambda: _namespace("builtins")),
    ("changes __main__", lambda: _namespace("__main__")),
    ("sets up the root logger", _root_logger),
    ("sets the log record factory", _log_classes),
    ("replaces warnings.showwarning", _showwarning),
    (
        "sets the multiprocessing start method",
        lambda: _Same(
            getattr(_attribute("multiprocessing.context", "_default_context"), "_actual_context", None)
        ),
    ),
    ("sets the asyncio policy", lambda: _Same(_attribute("asyncio.events", "_event_loop_policy"))),
    ("sets the default socket timeout", lambda: _attribute("_socket", "getdefaulttimeout", lambda: None)()),
    ("enables faulthandler", lambda: bool(_attribute("faulthandler", "is_enabled", bool)())),
    ("changes the locale", lambda: _locale.setlocale(_locale.LC_ALL, None)),
    ("changes the directory", _directory),
    ("changes the umask", _umask),
    ("changes the priority", lambda: os.getpriority(os.PRIO_PROCESS, 0)),
    ("changes the CPU affinity", lambda: getattr(os, "sched_getaffinity", lambda _: ())(0)),
    ("changes a resource limit", _limits),
    ("starts a timer", lambda: [signal.getitimer(kind)[0] > 0 for kind in _TIMERS]),
    ("sets the garbage collector", lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug())),
    ("sets the wake-up descriptor of signals", lambda: _wakeup_fd()),
    # In a fork it would be on from the first line, and not from the import of a module that needs it on.
    ("turns the GIL on", lambda: getattr(sys, "_is_gil_enabled", lambda: True)()),
)


def _attribute(module: str, name: str, default: Any = None) -> Any:
    return getattr(sys.modules.get(module), name, default)


# ---- signals -------------------------------------------------------------------------------------

_NUMBERS = sorted(signal.valid_signals())


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in _NUMBERS]


def _wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    if fd >= 0:
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    return fd


def _signal_name(number: int) -> str:
    names = [name for name in dir(signal) if name.startswith("SIG") and "_" not in name]
    return next((name for name in names if getattr(signal, name) == number), f"signal {number}")


# ---- what the imports find -----------------------------------------------------------------------


class as_in_a_script:
    """While it is entered, imports find signal handlers and arguments as in a script that was not given any.

    The signals that the helpers ignore are held back meanwhile, and discarded in the end. A use of sys.argv
    is noted.
    """

    def __init__(self, reads: list[str]) -> None:
        self._reads = reads

    def __enter__(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        self._handlers = _handlers()
        for number in _NUMBERS:
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, _fresh_handler(number))
        self._argv = sys.argv, sys.orig_argv
        sys.argv, sys.orig_argv = (_Arguments(words, self._reads) for words in ([""], sys.orig_argv))

    def __exit__(self, *error: object) -> None:
        sys.argv, sys.orig_argv = self._argv
        for number, handler in zip(_NUMBERS, self._handlers, strict=True):
            if number in _HELD:
                signal.signal(number, signal.SIG_IGN)  # discards what is pending
            if handler is not None and number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


class _Arguments(list[str]):
    """sys.argv while modules are imported; every use of it is noted."""

    def __init__(self, words: list[str], reads: list[str]) -> None:
        super().__init__(words)
        self._reads = reads

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            list.__getattribute__(self, "_reads").append("reads sys.argv")
        return list.__getattribute__(self, name)


def _noting(method: str) -> Callable[..., Any]:
    inherited = getattr(list, method)

    def use(self: _Arguments, *args: Any) -> Any:
        self._reads.append("reads sys.argv")
        return inherited(self, *args)

    return use


for _method in (
    "__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__add__", "__mul__",
    "__repr__", "__reversed__", "__setitem__", "__delitem__", "__iadd__",
):  # fmt: skip
    setattr(_Arguments, _method, _noting(_method))


def _fresh_handler(number: int) -> Any:
    if number == signal.SIGINT:
        return signal.default_int_handler
    return signal.SIG_IGN if number in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL
