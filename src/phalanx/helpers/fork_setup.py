"""Turns a fork of the zygote into a worker: session, signals, descriptors, and a fresh interpreter state."""

from __future__ import annotations

import os
import sys

from phalanx import kernel
from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from phalanx.helpers.messages import Handover, Program
    from phalanx.helpers.preload.preload import ImportResidue


# ---- the process ---------------------------------------------------------------------------------


def leave_zygote(zygote: int) -> None:
    """Give a fork a session of its own, and make it die with the zygote."""
    os.setsid()
    kernel.die_with_parent()
    if os.getppid() != zygote:  # it died before the line above took effect
        os._exit(127)
    signal.set_wakeup_fd(-1)


def default_signals(ignored: list[int]) -> None:
    """Reset all handlers, except for the signals that the agent ignores (nohup's SIGHUP)."""
    for sig in signal.valid_signals():
        if sig in (signal.SIGKILL, signal.SIGSTOP):
            continue
        if sig in ignored:
            signal.signal(sig, signal.SIG_IGN)
        elif signal.getsignal(sig) not in (signal.SIG_DFL, None):
            signal.signal(sig, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def move_above(fd: int, floor: int) -> int:
    """Move a descriptor to a free number from `floor` on."""
    moved = kernel.copy_above(fd, floor)
    os.close(fd)
    return moved


def place(std: list[int], extra: list[tuple[str, int, int]]) -> dict[str, int]:
    """Put the standard descriptors at 0-2 and the extra ones at their numbers (-1: any), inheritable."""
    floor = max([3, *(target + 1 for _, _, target in extra)])
    # First above all targets, so that no dup2 overwrites a source that is still needed.
    sources = [kernel.copy_above(fd, floor) for fd in (*std, *(fd for _, fd, _ in extra))]
    places = {}
    names = ["0", "1", "2", *(name for name, _, _ in extra)]
    targets = [0, 1, 2, *(target for _, _, target in extra)]
    for name, source, target in zip(names, sources, targets, strict=True):
        if target < 0:
            places[name] = source
            continue
        os.dup2(source, target)
        os.close(source)
        places[name] = target
    return places


class WorkerSeat:
    """A fork on its way to the place of a worker: descriptors, then the gate."""

    def __init__(self, order: Handover, fds: list[int]) -> None:
        """`fds`: the group's, then the gate and the status pipe."""
        self._launch = order.worker
        self._std = [fds[index] for index in order.group.std]
        *self._fds, self._gate, self._status = fds
        self._printed: list[int] = []
        self.places: dict[str, int] = {}

    def open(self, replays: bool) -> None:
        """Put the descriptors into their places. `replays`: the log begins with what was printed so far."""
        launch = self._launch
        extra = [(name, self._fds[index], target) for name, index, target in launch.fds]
        floor = max([3, *(target + 1 for _, _, target in extra)])
        # These two must not occupy the numbers of the worker's descriptors.
        self._gate, self._status = move_above(self._gate, floor), move_above(self._status, floor)
        if launch.stdin:
            self._std[0] = os.open(launch.stdin, os.O_RDONLY | os.O_CLOEXEC)
        for number, path in ((1, launch.stdout), (2, launch.stderr)):
            if path:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._std[number] = os.open(path, flags, 0o600)
        if replays:
            self._printed = [kernel.copy_above(number, floor) for number in (1, 2)]
        self.places = place(self._std, extra)

    def wait_at_gate(self) -> None:
        """The worker is set up; it runs when all of its group are, or never."""
        os.write(self._status, b"ready")
        if os.read(self._gate, 1) != b"g":
            os._exit(127)

    def settle(self, others: set[int]) -> None:
        """Close what an exec would close, of these and of those that came with the hand-over."""
        kernel.replay(self._printed)
        came = {self._gate, self._status, *self._std, *self._fds}
        for fd in (came | others) - set(self.places.values()) - {0, 1, 2, -1}:
            os.close(fd)

    def fail(self, error: BaseException) -> NoReturn:
        """Report why this fork could not become the worker."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            name = error.filename or next(iter(self._launch.argv), "")
            where = os.fsdecode(name) if isinstance(name, bytes | str) else ""
            hint = ""
            if error.errno == 8:  # ENOEXEC
                hint = " (not a program for this machine, or a script without a '#!' line)"
            text = f"{where}: {error.strerror}{hint}" if where else str(error.strerror)
        try:
            os.write(self._status, text.encode(errors="replace")[:4000])
        finally:
            os._exit(127)


# ---- the interpreter -----------------------------------------------------------------------------


def title_setter() -> Callable[[str], None]:
    """The function that changes what `ps` shows of this process; without the package, one without effect.

    Call it early: it relies on the environment as the kernel laid it out.
    """
    from importlib.machinery import PathFinder

    package = PathFinder.find_spec("setproctitle")
    if package is None:
        return _keep_title
    # The extension alone: the package around it imports logging, and with it a tenth of the library.
    spec = PathFinder.find_spec("setproctitle._setproctitle", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        return _keep_title
    module: Any = spec.loader.create_module(spec)
    spec.loader.exec_module(module)
    module.getproctitle()
    setter: Callable[[str], None] = module.setproctitle
    return setter


def _keep_title(title: str) -> None:
    """In place of a setter."""


def restore_interpreter(path: list[str], modules: set[str]) -> None:
    """Undo the zygote's changes to signal handling, sys.path and sys.modules."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:] = path
    preloaded = sys.modules.get("phalanx.helpers.preload.preload")
    residue = preloaded.left if preloaded is not None else None
    # The program may use another copy of phalanx. The standard library stays: a second copy of one of its
    # modules would be worse than one that is imported early.
    for name in [name for name in sys.modules if name not in modules]:
        if name.partition(".")[0] in ("phalanx", "setproctitle"):
            del sys.modules[name]
    if residue is not None:
        _apply_residue(residue)
    _make_unique()


def show_title(set_title: Callable[[str], None], program: Program, waits: bool) -> None:
    """Make `ps` show the program and its rank; `waits`: it may have none yet."""
    mode, target, args = program
    words = {"module": ["-m", target], "code": ["-c", target]}.get(mode, [target])
    rank = os.environ.get("RANK")
    title = " ".join([sys.executable, *words, *args])
    if rank is not None:
        title = f"{title} [rank {rank}]"
    elif waits:
        title = f"{title} [standby {os.environ.get('LOCAL_RANK')}]"
    set_title(title.encode(errors="replace").decode())  # file names may not be valid text
    # The short name that `pgrep` and `top` show, which the title has changed: as after an exec.
    kernel.set_name(os.path.basename(sys.executable))


def _apply_residue(residue: ImportResidue) -> None:
    """Repeat the effects of the preload outside of memory, as if this process had done the imports."""
    for name, (before, after) in residue.variables.items():
        if os.environb.get(name) != before:
            continue  # this worker has another value, which an import may have respected
        if after is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = after
    for fd, path in residue.files.items():
        try:
            _open_again(fd, path)
        except OSError:
            pass  # the file is gone or replaced; the old descriptor still works
    for fd, text in zip((1, 2), residue.printed, strict=True):
        try:
            while text:
                text = text[os.write(fd, text) :]
        except OSError:
            pass  # closed, or a full disk
    residue.renewal.apply()


def _open_again(fd: int, path: str) -> None:
    """The same file under the same number, with an offset that siblings do not share."""
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


def _make_unique() -> None:
    """Redo what an import of the standard library did once; most of it sees to this itself after a fork."""
    logging: Any = sys.modules.get("logging")
    if logging is not None and hasattr(logging, "_startTime"):
        import time

        # The origin of `relativeCreated`; newer versions of Python use nanoseconds.
        logging._startTime = time.time() if isinstance(logging._startTime, float) else time.time_ns()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    threading = sys.modules.get("threading")
    if threading is not None and hasattr(threading.Thread, "_set_native_id"):
        threading.main_thread()._set_native_id()
