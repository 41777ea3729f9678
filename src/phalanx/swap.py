"""Third-party programs on Phalanx, unchanged: what imports torch's elastic modules gets Phalanx's.

    python -m phalanx.swap program [arguments]      a script, a command on the PATH, or -m module
    phalanx.swap.install()                          in a program, before it imports torch's modules

`torch.distributed.elastic`, `.launcher`, `.run`, `.launch`, `.argparse_util` are swapped, the rest of torch
is not. The swap holds in child processes too: they inherit PYTHONPATH with a directory whose
sitecustomize installs it. A Python started with -I, -E or -S does not read it.

A module that was imported before `install` is replaced; names that were taken out of it stay torch's.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Any

__all__ = ["install", "main", "remove"]

_THEIRS = "torch.distributed."
_SWAPPED = ("elastic", "launcher", "run", "launch", "argparse_util")
_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "swapped")


def _counterpart(name: str) -> str | None:
    """Phalanx's module for one of torch's; None: it is not swapped."""
    if not name.startswith(_THEIRS):
        return None
    path = name[len(_THEIRS) :]
    return f"phalanx.{path}" if path.partition(".")[0] in _SWAPPED else None


class SwapFinder:
    """Finds Phalanx's modules under torch's names; stands first in `sys.meta_path`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The import system's question."""
        ours = _counterpart(name)
        if ours is None:
            return None
        from importlib.machinery import ModuleSpec
        from importlib.util import find_spec

        try:
            found = find_spec(ours)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return None
        package = found.submodule_search_locations is not None
        return ModuleSpec(name, self, origin=found.origin, is_package=package)  # type: ignore[arg-type]

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m torch.distributed.run`."""
        from importlib.util import find_spec

        ours = _counterpart(name) or name
        found: Any = find_spec(ours)
        code: CodeType | None = found.loader.get_code(ours)
        return code

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The import system's default."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put Phalanx's module in the place of the new, empty one."""
        from importlib import import_module

        ours = _counterpart(module.__name__)
        assert ours is not None, "only those are found"
        sys.modules[module.__name__] = import_module(ours)


def install(children: bool = True) -> None:
    """Swap the modules in this process and, with `children`, in every Python that it starts; idempotent."""
    if not any(isinstance(finder, SwapFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, SwapFinder())
    for name in [name for name in sys.modules if _counterpart(name)]:
        _replace(name)
    if children:
        from phalanx.job.environment import prepend_python_path

        prepend_python_path(_DIRECTORY)


def _replace(name: str) -> None:
    """Phalanx's module in the place of one that is already imported."""
    ours = _counterpart(name)
    module = sys.modules[name]
    if ours is None or module.__name__ == ours:
        return
    from importlib import import_module

    try:
        replacement = import_module(ours)
    except ModuleNotFoundError:
        return  # torch has a module that Phalanx does not have
    sys.modules[name] = replacement
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, replacement)


def remove() -> None:
    """Undo `install` for what is imported from now on, here and in new child processes."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, SwapFinder)]
    for name in [name for name in sys.modules if _counterpart(name)]:
        if sys.modules[name].__name__ == _counterpart(name):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, sys)).pop(child, None)
    from phalanx.job.environment import drop_python_path

    drop_python_path(_DIRECTORY)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m phalanx.swap`: become the program, with the swap in its environment."""
    from phalanx.job.environment import prepend_python_path, variables

    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        text = "usage: python -m phalanx.swap PROGRAM [arguments], or -m MODULE [arguments]\n"
        (sys.stdout if words else sys.stderr).write(text)
        return 0 if words else 2
    command = _command(words)
    if command is None:
        sys.stderr.write(f"phalanx.swap: {words[0]}: no such script, and no such command on the PATH\n")
        return 2
    prepend_python_path(_DIRECTORY)
    try:
        os.execve(command[0], command, dict(variables()))
    except OSError as error:
        sys.stderr.write(f"phalanx.swap: {command[0]}: {error.strerror}\n")
        return 2


def _command(words: list[str]) -> list[str] | None:
    """The whole command line; None where there is no such program."""
    if words[0] == "-m" and len(words) > 1:
        return [sys.executable, *words]
    if words[0].endswith(".py") or (os.path.isfile(words[0]) and not os.access(words[0], os.X_OK)):
        return [sys.executable, *words] if os.path.isfile(words[0]) else None
    from shutil import which

    # Beside this Python first: its own `accelerate`, without an activated environment.
    beside = os.path.join(os.path.dirname(sys.executable), words[0])
    found = beside if os.sep not in words[0] and os.access(beside, os.X_OK) else which(words[0])
    return [found, *words[1:]] if found else None


if __name__ == "__main__":
    raise SystemExit(main())
