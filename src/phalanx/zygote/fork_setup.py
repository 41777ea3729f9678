"""A fork of the zygote made to look like an interpreter that has just started."""

from __future__ import annotations

import os
import sys

from phalanx import kernel
from phalanx.zygote.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.warm.preload import ImportResidue


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
    preloaded = sys.modules.get("phalanx.warm.preload")
    left = preloaded.left if preloaded is not None else None
    # The program shall not find our modules: its own copy of phalanx may be another one. What we needed
    # of the standard library stays: a second copy of it would be worse than one that is there early.
    for name in [name for name in sys.modules if name not in modules]:
        if name.partition(".")[0] in ("phalanx", "setproctitle"):
            del sys.modules[name]
    _inherit(left)
    _differ()
    if set_title is not None:
        mode, target, args = spec["program"]
        words = {"module": ["-m", target], "code": ["-c", target]}.get(mode, [target])
        rank = os.environ.get("RANK")
        title = " ".join([sys.executable, *words, *args])
        title = f"{title} [rank {rank}]" if rank is not None else title
        set_title(title.encode(errors="replace").decode())  # names of files need not be text
    # The short name, by which `pgrep` and `top` know a process: as after an exec, and not "phalanx-zygote".
    kernel.set_name(os.path.basename(sys.executable))


def _inherit(left: ImportResidue | None) -> None:
    """What the imports have left behind outside of memory, as if this process had done them."""
    if left is None:
        return
    for name, (before, after) in left.variables.items():
        if os.environb.get(name) != before:
            continue  # this worker was given another value, which an import may have respected
        if after is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = after
    for fd, path in left.files.items():
        try:
            _open_again(fd, path)
        except OSError:
            pass  # it is gone, or another file; the old descriptor still works
    for fd, text in zip((1, 2), left.said, strict=True):
        try:
            while text:
                text = text[os.write(fd, text) :]
        except OSError:
            pass  # closed, or a full disk


def _open_again(fd: int, path: str) -> None:
    """The same file at the same place, but with an offset that siblings do not share."""
    import fcntl

    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
    offset = os.lseek(fd, 0, os.SEEK_CUR)
    inheritable = os.get_inheritable(fd)
    new = os.open(path, flags | os.O_CLOEXEC)
    try:
        if os.path.samestat(os.fstat(new), os.fstat(fd)):
            os.lseek(new, offset, os.SEEK_SET)
            os.dup2(new, fd, inheritable)
    finally:
        os.close(new)


def _differ() -> None:
    """What fresh processes draw or note when they import it must be each sibling's own too.

    Some of the standard library sees to this itself when it is forked (random, uuid, tempfile).
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch_c = sys.modules.get("torch._C")
    if torch_c is not None and hasattr(torch_c, "default_generator"):
        torch_c.default_generator.seed()  # from the system, as a fresh process has it
    logging: Any = sys.modules.get("logging")
    if logging is not None and hasattr(logging, "_startTime"):
        import time

        # What its `relativeCreated` counts from; in nanoseconds from some version on.
        logging._startTime = time.time() if isinstance(logging._startTime, float) else time.time_ns()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    threading = sys.modules.get("threading")
    if threading is not None and hasattr(threading.Thread, "_set_native_id"):
        threading.main_thread()._set_native_id()
