# ruff: noqa: E402, F401 - the import to observe comes first
"""What a script can observe after it has imported MODULE: four_starts.py fills in the name, and runs it.

The import stands at the top, so that a launch waits for its preload.
"""

import sys

early = "MODULE" in sys.modules
failed = ""
try:
    import MODULE
except ImportError as error:
    failed = error
third = [
    name
    for name in list(sys.modules)
    if name.partition(".")[0] not in sys.stdlib_module_names
    and not name.startswith(("phalanx", "setproctitle", "__"))
]
import asyncio
import atexit
import builtins
import decimal
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import threading
import types
import warnings


def name_of(thing):
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"


def plain(value):
    if type(value) in (list, tuple):
        return len(value) < 200 and all(map(plain, value))
    return type(value) in (str, bytes, int, float, bool, type(None))


def files():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if (
            int(fd) > 2
            and not what.startswith(("/memfd:phalanx", "/proc/", "/tmp/phalanx"))
            and ".stack" not in what
        ):
            found.append(what.partition("[")[0])
    return sorted(found)


def values():
    found = {}
    for name in third:
        space = (
            types.ModuleType.__dict__["__dict__"].__get__(sys.modules[name])
            if isinstance(sys.modules[name], types.ModuleType)
            else {}
        )
        for key, value in list(space.items()):
            if not key.startswith("__") and plain(value):
                found[f"{name}.{key}"] = repr(value)[:200]
    return found


own = ("RANK", "TORCHELASTIC", "PHALANX", "MASTER_PORT", "_RANK", "WORLD_SIZE", "ROLE", "PWD", "SHLVL")
state = {
    "signals": {
        int(s): name_of(signal.getsignal(s)) if callable(signal.getsignal(s)) else str(signal.getsignal(s))
        for s in signal.valid_signals()
    },
    "sys.path": sys.path,
    "sys.argv": sys.argv,
    "sys.orig_argv": sys.orig_argv[1:],
    "main": [
        sys.modules["__main__"].__file__,
        sorted(k for k in vars(sys.modules["__main__"]) if k[0] == "_"),
    ],
    "finders": [name_of(one) for one in sys.meta_path if "Recorder" not in name_of(one)],
    "path hooks": len(sys.path_hooks),
    "hooks": [
        name_of(one)
        for one in (
            sys.excepthook,
            sys.unraisablehook,
            sys.displayhook,
            sys.breakpointhook,
            threading.excepthook,
        )
    ]
    + [str(sys.gettrace()), str(sys.getprofile())],
    "warnings": [*sorted(str(one) for one in warnings.filters), name_of(warnings.showwarning)],
    "root logger": [
        logging.root.level,
        [name_of(one) for one in logging.root.handlers],
        logging.root.manager.disable,
    ],
    "loggers": {
        name: [one.level, one.propagate, [name_of(h) for h in one.handlers]]
        for name, one in logging.root.manager.loggerDict.items()
        if isinstance(one, logging.Logger)
    },
    "locale": locale.setlocale(locale.LC_ALL),
    "umask": os.umask(0o22),
    "directory": os.getcwd(),
    "limits": [resource.getrlimit(n) for n in range(16)],
    "nice": os.getpriority(0, 0),
    "cpus": sorted(os.sched_getaffinity(0)),
    "start method": multiprocessing.get_start_method(allow_none=True),
    "gc": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks)],
    "faulthandler": faulthandler.is_enabled(),
    "interpreter": [
        sys.getrecursionlimit(),
        sys.getswitchinterval(),
        sys.get_int_max_str_digits(),
        sys.getdlopenflags(),
        sys.dont_write_bytecode,
    ],
    "builtins": sorted(vars(builtins)),
    "decimal": str(decimal.getcontext()),
    "exit functions": atexit._ncallbacks(),
    "policy": name_of(asyncio.get_event_loop_policy()),
    "environment": {k: v for k, v in os.environ.items() if not any(word in k for word in own)},
    "files": files(),
    "threads": sorted(t.name.rstrip("0123456789") for t in threading.enumerate()),
    "modules": sorted(third),
    "timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    "streams": [sys.stdout is sys.__stdout__, sys.stdout.encoding, sys.stdout.line_buffering],
    "failed": str(failed),
}
drawn = {"random": random.random()}
if "numpy.random" in sys.modules:
    drawn["numpy"] = float(sys.modules["numpy.random"].rand())
if "torch" in sys.modules and hasattr(sys.modules["torch"], "rand"):
    drawn["torch"] = float(sys.modules["torch"].rand(1, dtype=sys.modules["torch"].float64))
out = os.environ["SNAPSHOT_TO"] + os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(out, "w") as file:
    json.dump({"state": state, "values": values(), "drawn": drawn, "early": early}, file, default=str)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ.get("SNAPSHOT_AGAIN"):
    os._exit(1)
