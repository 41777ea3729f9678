"""A fork of the zygote made to look like an interpreter that has just started."""

from __future__ import annotations

import os
import sys

from phalanx.processes.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def titles() -> Callable[[str], None] | None:
    """How a process changes what `ps` shows of it. To be asked for early: it works only on the environment
    as the kernel laid it out."""
    from importlib.machinery import PathFinder

    package = PathFinder.find_spec("setproctitle")
    if package is None:
        return None
    # The extension alone: the package around it imports logging, and with it a tenth of the library.
    spec = PathFinder.find_spec("setproctitle._setproctitle", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        return None
    module: Any = spec.loader.create_module(spec)
    spec.loader.exec_module(module)
    module.getproctitle()
    setter: Callable[[str], None] = module.setproctitle
    return setter


def tidy(
    spec: dict[str, Any], path: list[str], modules: set[str], set_title: Callable[[str], None] | None
) -> None:
    """Undo what being a zygote has left behind: signal handling, sys.path, our modules, the name."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:] = path
    # The program shall not find our modules: its own copy of phalanx may be another one. What we needed
    # of the standard library stays: a second copy of it would be worse than one that is there early.
    for name in [name for name in sys.modules if name not in modules]:
        if name.partition(".")[0] in ("phalanx", "setproctitle"):
            del sys.modules[name]
    _differ()
    if set_title is not None:
        mode, target, args = spec["program"]
        words = {"module": ["-m", target], "code": ["-c", target]}.get(mode, [target])
        rank = os.environ.get("RANK")
        title = " ".join([sys.executable, *words, *args])
        title = f"{title} [rank {rank}]" if rank is not None else title
        set_title(title.encode(errors="replace").decode())  # names of files need not be text


def _differ() -> None:
    """What fresh processes draw from the system when they import it must differ between siblings too.

    The standard library sees to this itself when it is forked (random, uuid, tempfile), and torch's default
    seed is the same in all fresh processes anyway; numpy's old global generator is the one left.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
