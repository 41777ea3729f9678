"""Records what a worker imports, for helpers that prepare the next start.

Each import is written at once, because a killed worker cannot report at its end:

    NAME    an installed module, or one of the standard library
    =PATH   a user's file; it is never preloaded
    !NAME   a user's module that hides an installed one

The worker loads this file by path, like bootstrap.py: standard library only, quoted annotations.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Variables that the dynamic linker, Python, libc or OpenSSL obey: each of them can load code from a file of
# its value. They are never set in the zygote; a script that sets one ends the list.
_LOADS_CODE = ("LD_", "DYLD_", "PYTHON", "OPENSSL_", "SSL_", "GCONV_", "MALLOC_", "GLIBC_", "BASH_")
_LOADS_CODE_NAMES = ("PATH", "ENV", "IFS", "LOCPATH", "NLSPATH", "HOSTALIASES", "RES_OPTIONS")


def homes() -> tuple[str, ...]:
    """The directories of installed packages and the standard library."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages", ".zip"))]
    library = os.path.dirname(os.__file__)
    return tuple(os.path.join(path, "") for path in [*packages, library, library + "/lib-dynload"])


def loads_code(variable: str) -> bool:
    """Whether the value of this variable can make a program load code."""
    return variable.startswith(_LOADS_CODE) or variable in _LOADS_CODE_NAMES


class ImportRecorder:
    """A finder that finds nothing: it only records the names."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._homes = homes()
        self._own: dict[str, bool] = {}  # top-level name → whether it is the user's

    def find_spec(self, name: str, path: "Any" = None, target: object = None) -> None:
        try:
            # Packages look for others (importlib.util.find_spec) without importing them.
            if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
                self._note(name, path)
        except Exception:  # noqa: BLE001 - recording must not make an import fail
            pass

    def _note(self, name: str, path: "Any") -> None:
        top, _, inside = name.partition(".")
        if top == "phalanx":
            return  # neither preloaded nor the user's, wherever it is installed
        if top not in self._own:
            self._own[top] = top == "__main__" or self._is_own(top)  # of a directory or a zip file
        if not self._own[top]:
            self._write(name)
        elif found := self._find(name, path if inside else None):
            self._write(f"={found}")

    def _is_own(self, top: str) -> bool:
        if top in sys.builtin_module_names:
            return False
        found = self._find(top, None)
        if found is None or found.startswith(self._homes):
            return False
        hidden = self._find(top, [home.rstrip("/") for home in self._homes])
        if hidden:
            self._write(f"!{top}")
        return True

    def _find(self, name: str, path: "list[str] | None") -> str | None:
        spec = sys.modules["_frozen_importlib_external"].PathFinder.find_spec(name, path)
        return spec.origin if spec is not None and spec.has_location else None

    def _write(self, line: str) -> None:
        try:
            os.write(self.fd, f"{line}\n".encode("utf-8", "surrogateescape"))
        except OSError:
            pass  # closed by a program that closes all descriptors
