"""The command line of a worker: finds the program, and inserts the bootstrap for Python.

`python script.py` with this process's own interpreter is started through the bootstrap, which records its
traceback without a decorator. Any other program, and any use of Python that the bootstrap cannot imitate
exactly, is executed unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from phalanx.errors import StartError
from phalanx.python_command import PACKAGE_ROOT

BOOTSTRAP = os.path.join(PACKAGE_ROOT, "phalanx", "worker", "_importlib_bootstrap.py")

# Variables that libc and the loader read only at the start of a process.
_READ_AT_START = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "MALLOC_ARENA_MAX", "TZ")
_LONE_FLAGS = frozenset("bBdEIOPqRsSuv")  # flags without a value that the bootstrap supports


def find_program(program: str, env: Mapping[str, str]) -> str:
    """The path of an executable, searched like execvp in the worker's own PATH."""
    if not program:
        raise StartError("the name of the program is empty")
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
        raise StartError(f"{found}: is not executable; chmod +x it, or give the program that runs it")
    if os.sep in program:
        kind = "is a directory" if os.path.isdir(program) else "no such file"
        raise StartError(f"{program}: {kind}")
    raise StartError(f"{program}: not found in PATH ({env.get('PATH', os.defpath)})")


def worker_argv(program: str, path: str, args: Sequence[str], options: str) -> list[str]:
    """argv for the worker, through the bootstrap if possible."""
    plain = [program, *args]
    if not _is_this_python(path):
        return plain
    split = split_python(args)
    if split is None:
        return plain
    flags, mode, target, rest = split
    return [program, *flags, BOOTSTRAP, mode, options, target, *rest]


def _is_this_python(path: str) -> bool:
    """Whether it is the same interpreter *and* the same environment: the python of a venv is a link."""
    if path == sys.executable:
        return True
    try:
        return os.path.dirname(os.path.abspath(path)) == os.path.dirname(
            os.path.abspath(sys.executable)
        ) and os.path.samefile(path, sys.executable)
    except OSError:
        return False


def other_environment(environ: Mapping[str, str], folder: str) -> tuple[str, str] | None:
    """The Python environment that a person in this one probably means, if it is not that of this process.

    Its name and its interpreter. `folder`: the script's. An environment that is ours settles it, whatever
    else is active. conda activates `base` in every shell, so that one says nothing.
    """
    named = {
        "VIRTUAL_ENV": environ.get("VIRTUAL_ENV", ""),
        "CONDA_PREFIX": "" if environ.get("CONDA_DEFAULT_ENV") == "base" else environ.get("CONDA_PREFIX", ""),
        ".venv beside the script": os.path.join(folder, ".venv"),
    }
    ours = os.path.realpath(sys.prefix)
    found = None
    for name, path in named.items():
        if path and os.path.realpath(path) == ours:
            return None
        python = os.path.join(path, "bin", "python")
        if path and found is None and os.access(python, os.X_OK):
            found = name, python
    return found


def split_python(args: Sequence[str]) -> tuple[list[str], str, str, list[str]] | None:
    """Interpreter flags, mode (script, module, code), target, program arguments; None: not supported."""
    index = 0
    while index < len(args):
        arg = args[index]
        if arg in ("-m", "-c"):
            if index + 1 >= len(args):
                return None
            if arg == "-c" and sys.version_info >= (3, 14):
                return None  # it keeps the text for tracebacks where it cannot be set
            mode = "module" if arg == "-m" else "code"
            return list(args[:index]), mode, args[index + 1], list(args[index + 2 :])
        if arg in ("-W", "-X"):
            index += 2
        elif arg.startswith(("-W", "-X")) or (
            arg.startswith("-") and len(arg) > 1 and set(arg[1:]) <= _LONE_FLAGS
        ):
            index += 1
        elif arg.startswith("-"):
            return None  # "-" (stdin), -i, -x, --version …
        elif os.path.isfile(arg) or os.path.isdir(arg) or not os.path.exists(arg):
            return list(args[:index]), "script", arg, list(args[index + 1 :])
        else:
            return None  # a pipe, which can be read only once
    return None


def python_flags(
    program: str, args: Sequence[Sequence[str]], envs: Mapping[int, Mapping[str, str]]
) -> list[str] | None:
    """The interpreter flags of all ranks, if each can be a fork of one Python; else None.

    A fork cannot change what an interpreter reads only at its start: its flags and PYTHON* variables.
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
