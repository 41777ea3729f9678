"""What exactly a worker executes: finding the program, and slipping our first lines under Python's.

A worker that is `python script.py` with the interpreter this process runs on is started through
the bootstrap, which is how its traceback is known without a decorator. Any other program, and any use
of Python that the bootstrap could not imitate to the letter, is executed as it stands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from phalanx.errors import StartError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BOOTSTRAP = os.path.join(_PACKAGE, "zygote", "_importlib_bootstrap.py")

# What libc and the loader read once, at the start of a process.
_READ_AT_START = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "MALLOC_ARENA_MAX", "TZ")
_LONE_FLAGS = frozenset("bBdEIOPqRsSuv")  # interpreter flags without a value that change nothing for us


def find_program(program: str, env: Mapping[str, str]) -> str:
    """The path of an executable, looked up as execvp would with the worker's own PATH."""
    if not program:
        raise StartError("the program to run has no name")
    if os.sep in program:
        candidates = [program]
    else:
        path = env.get("PATH", os.defpath)
        candidates = [os.path.join(directory or ".", program) for directory in path.split(os.pathsep)]
    found = None
    for candidate in candidates:
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            found = found or candidate
    if found:
        raise StartError(f"{found}: is not executable (chmod +x it, or name the program that runs it)")
    if os.sep in program:
        kind = "is a directory" if os.path.isdir(program) else "no such file"
        raise StartError(f"{program}: {kind}")
    raise StartError(f"{program}: not found in PATH ({env.get('PATH', os.defpath)})")


def worker_argv(program: str, path: str, args: Sequence[str], options: str) -> list[str]:
    """argv for the worker; through the bootstrap where that is safe."""
    plain = [program, *args]
    if not _is_this_python(path):
        return plain
    split = split_python(args)
    if split is None:
        return plain
    flags, mode, target, rest = split
    return [program, *flags, BOOTSTRAP, mode, options, target, *rest]


def _is_this_python(path: str) -> bool:
    """The same interpreter *and* the same environment: a venv's python is a link to another's."""
    if path == sys.executable:
        return True
    try:
        return os.path.dirname(os.path.abspath(path)) == os.path.dirname(
            os.path.abspath(sys.executable)
        ) and os.path.samefile(path, sys.executable)
    except OSError:
        return False


def split_python(args: Sequence[str]) -> tuple[list[str], str, str, list[str]] | None:
    """Interpreter flags, mode (script, module, code), target, the program's arguments; None: leave alone."""
    index = 0
    while index < len(args):
        arg = args[index]
        if arg in ("-m", "-c"):
            if index + 1 >= len(args):
                return None
            if arg == "-c" and sys.version_info >= (3, 14):
                return None  # it keeps the text for tracebacks in a place that has no door
            mode = "module" if arg == "-m" else "code"
            return list(args[:index]), mode, args[index + 1], list(args[index + 2 :])
        if arg in ("-W", "-X"):
            index += 2
        elif arg.startswith(("-W", "-X")) or (
            arg.startswith("-") and len(arg) > 1 and set(arg[1:]) <= _LONE_FLAGS
        ):
            index += 1
        elif arg.startswith("-"):
            return None  # "-" (stdin), -i, -x, --version …: the interpreter knows best
        elif os.path.isfile(arg) or os.path.isdir(arg):
            return list(args[:index]), "script", arg, list(args[index + 1 :])
        else:
            return None  # not there, or a pipe: the interpreter says it best
    return None


def python_flags(
    program: str, args: Sequence[Sequence[str]], envs: Mapping[int, Mapping[str, str]]
) -> list[str] | None:
    """The interpreter flags that all ranks share, when each can be a fork of one Python; else None.

    A fork cannot change what an interpreter reads only when it starts: its flags and PYTHON* variables.
    """
    try:
        path = find_program(program, os.environ)
    except StartError:
        return None
    if not _is_this_python(path):
        return None
    common: list[str] | None = None
    for words in args:
        split = split_python(words)
        if split is None or any(" " in flag for flag in split[0]):
            return None
        if common is not None and split[0] != common:
            return None
        common = split[0]
    for env in envs.values():
        if any(name.startswith("PYTHON") and os.environ.get(name) != value for name, value in env.items()):
            return None
        if any(name in env for name in _READ_AT_START):
            return None
    return common
