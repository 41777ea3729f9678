"""A script sets a variable that a preloaded package has read with another value, before its own import of it.

The text of the user's files tells most of these cases in advance (variables.py); this is for names that are
computed. It runs in the worker:

* If the worker has done nothing yet that can be seen from outside, it is executed again, without a preload.
* Else one line says what happened.

In both cases the package is not preloaded from the next start on: the recorder's file carries the line
`-PACKAGE why` to the agent (import_cache.py).
"""

from __future__ import annotations

import os
import sys

from phalanx import kernel
from phalanx.zygote.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_WORKER = "PHALANX_WORKER"  # as in bootstrap.py, which is no module of the package
_TALLY_FD = 12


class LateVariables:
    """Watches os.putenv and os.unsetenv in one worker."""

    def __init__(
        self, read: Mapping[bytes, bytes | None], readers: Mapping[bytes, str], spec: dict[str, Any]
    ) -> None:
        """`read`: the variables that imports have read, with their values; `readers`: what was imported."""
        self._read = read
        self._readers = readers
        self._learn = spec["places"].get("learn", -1)
        self._cold = ColdStart(spec)
        self._pid = os.getpid()
        self._told: set[str] = set()

    def install(self) -> None:
        """From now on."""
        putenv, unsetenv = os.putenv, os.unsetenv

        def put(name: Any, value: Any, /) -> None:
            putenv(name, value)
            self._changed(os.fsencode(name), os.fsencode(value))

        def unset(name: Any, /) -> None:
            unsetenv(name)
            self._changed(os.fsencode(name), None)

        os.putenv, os.unsetenv = put, unset

    def _changed(self, name: bytes, value: bytes | None) -> None:
        if name not in self._read or self._read[name] == value or os.getpid() != self._pid:
            return
        package = self._readers.get(name, "").partition(".")[0]
        if (
            not package
            or package in self._told
            or package in sys.stdlib_module_names
            or _is_imported(package)
        ):
            return
        self._told.add(package)
        why = f"reads {os.fsdecode(name)}, which the script sets"
        try:
            if self._learn >= 0:
                os.write(self._learn, f"-{package} {why}\n".encode())
        except OSError:
            pass  # closed by a program that closes all descriptors
        self._cold.execute()
        if self._learn >= 0:  # one rank is enough
            line = f"{os.fsdecode(name)} was set after {package} had been preloaded with another value of it"
            os.write(2, f"phalanx: {line}; start again, or use --warm off\n".encode())


def _is_imported(package: str) -> bool:
    """Whether the user's code has it: in `__main__`, or in a module that is not an installed one."""
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        file = space.get("__file__") if isinstance(space, dict) else None
        if space is None or not isinstance(file, str) or "/site-packages/" in file or "/lib/python" in file:
            continue
        for value in list(space.values()):
            is_module = issubclass(type(value), type(sys))
            name = getattr(value, "__name__" if is_module else "__module__", "")
            if isinstance(name, str) and name.partition(".")[0] == package:
                return True
    return False


class ColdStart:
    """How to execute this worker again, from scratch, as long as it has done nothing."""

    def __init__(self, spec: dict[str, Any]) -> None:
        mode, target, args = spec["program"]
        # As it was started: the words before those of the bootstrap are the interpreter and its flags.
        head = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv)]
        self._words = [*head, sys.argv[0], mode, spec["options"], target, *args]
        self._possible = kernel.LINUX and mode != "function" and spec.get("standby") is None
        self._environ = dict(os.environ)
        self._places: dict[str, int] = spec["places"]
        self._directory = os.getcwd()
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._written = _written()
        self._connections = _connections()

    def execute(self) -> None:
        """Returns only if something was done that would be done twice."""
        if not self._possible or not self._is_quiet():
            return
        environ = dict(self._environ)
        if "board" in self._places:
            _, _, *rest = os.environ[_WORKER].split(",")
            moved = [kernel.copy_above(self._places[name], _TALLY_FD + 1) for name in ("board", "bell")]
            for fd in moved:
                os.set_inheritable(fd, True)
            environ[_WORKER] = ",".join([*map(str, moved), *rest])
        if "tally" in self._places:
            tally = kernel.copy_above(self._places["tally"], _TALLY_FD + 1)
            os.dup2(tally, _TALLY_FD)
        os.chdir(self._directory)
        os.umask(self._umask)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execve(sys.executable, self._words, environ)

    def _is_quiet(self) -> bool:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        learn = self._places.get("learn", -1)
        own = os.fstat(learn).st_size if learn >= 0 else 0  # what the recorder has written
        own += 16 if "board" in self._places else 0  # and what bootstrap.py writes on the board
        return (
            _written() - self._written == own
            and len(os.listdir("/proc/self/task")) == 1
            and not kernel.children()
            and _connections() <= self._connections
        )


def _written() -> int:
    """The bytes that this process has written, to whatever it was."""
    try:
        with open("/proc/self/io") as file:
            return int(next(line for line in file if line.startswith("wchar")).split()[1])
    except (OSError, StopIteration):
        return -1


def _connections() -> set[str]:
    """Sockets and pipes that are open."""
    found = set()
    for fd in os.listdir("/proc/self/fd") if kernel.LINUX else ():
        try:
            what = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # that of the listing
        if what.startswith(("socket:", "pipe:")):
            found.add(what)
    return found
