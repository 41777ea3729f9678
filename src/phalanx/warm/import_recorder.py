"""Records what the first worker of a group imports, for the preload of the next start.

Each import is written at once, because a killed worker cannot report at its end. The preloading process does
not run the user's code, so the list also contains what that code does that can affect an import:

    NAME          an installed module, or one of the standard library
    =PATH         a user's file; it is never preloaded
    !NAME         a user's module that shadows an installed one
    +NAME=VALUE   a variable that the script sets here, to the same value in every run,
    ?NAME=VALUE   or only if it is not set
    ~NAME         a variable that the user's code sets here to a value that may differ in the next run. Later
                  imports may depend on it and are not recorded
    %NAME COUNT   so many threads were started when this module, or one that imports it, was executed
    >PATH         the file of `__main__`
    @LINE         the line of that file from which the following imports come

The worker loads this file by path, like bootstrap.py: standard library only, quoted annotations.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

# Variables that the dynamic linker, Python, libc or OpenSSL obey: each of them can load code from a file of
# its value. They are never set in the zygote; a script that sets one ends the list.
_LOADS_CODE = ("LD_", "DYLD_", "PYTHON", "OPENSSL_", "SSL_", "GCONV_", "MALLOC_", "GLIBC_", "BASH_")
_LOADS_CODE_NAMES = ("PATH", "ENV", "IFS", "LOCPATH", "NLSPATH", "HOSTALIASES", "RES_OPTIONS")
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without the module


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
        self._pid = os.getpid()
        self._unsure = False
        self._line = 0  # of the script
        self._threads = self._count_threads()
        self._last = ""
        # An audit hook was rejected: it runs for every event until the process exits. During shutdown it
        # released the lock to C++ threads, which then found no interpreter and aborted.
        self._putenv, self._unsetenv = os.putenv, os.unsetenv
        os.putenv, os.unsetenv = self._put, self._unset

    # -- imports ----------------------------------------------------------------------------------

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
        if self._own[top]:
            found = self._find(name, path if inside else None)
            if found:
                self._write(f"={found}")
        elif not self._unsure:
            threads = self._count_threads()
            if self._last and threads > self._threads:
                self._write(f"%{self._last} {threads - self._threads}")
            self._threads, self._last = threads, name
            self._place()
            self._write(name)

    @staticmethod
    def _count_threads() -> int:
        try:
            return os.stat("/proc/self/task").st_nlink - 2
        except OSError:
            return 0

    def _place(self) -> None:
        """Note which line of the script is being executed."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                break  # the innermost one: the launcher's own frame is below it
            frame = frame.f_back
        if frame is None or frame.f_lineno == self._line:
            return
        if not self._line:
            self._write(f">{frame.f_code.co_filename}")
        self._line = frame.f_lineno
        self._write(f"@{self._line}")

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

    # -- variables --------------------------------------------------------------------------------

    def _put(self, name: "Any", value: "Any", /) -> None:
        self._putenv(name, value)
        self._changed(name, value)

    def _unset(self, name: "Any", /) -> None:
        self._unsetenv(name)
        self._changed(name, None)

    def _changed(self, name: "Any", value: "Any") -> None:
        try:
            if not self._unsure and os.getpid() == self._pid:
                self._set(os.fsdecode(name), None if value is None else os.fsdecode(value))
        except Exception:  # noqa: BLE001 - recording must not make the program fail
            pass
        if self._unsure and os.putenv == self._put:  # nothing more is recorded
            os.putenv, os.unsetenv = self._putenv, self._unsetenv

    def _set(self, name: str, value: str | None) -> None:
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code.co_filename in ("<frozen os>", os.__file__):
            frame = frame.f_back
        setter = frame
        while frame is not None and not self._is_users(frame):
            if "importlib" in frame.f_code.co_filename and "_bootstrap" in frame.f_code.co_filename:
                return  # an effect of an import, which the preload repeats
            frame = frame.f_back
        if frame is None or (frame is not setter and frame.f_code.co_name != "<module>"):
            return  # set by a package at work, after the imports at the top of the script
        try:
            word = _constant(frame, name, value) if frame is setter and not loads_code(name) else ""
        except Exception:  # noqa: BLE001 - some other statement
            word = ""
        self._unsure = not word
        self._write(f"{word}{name}={value}" if word else f"~{name}")

    def _is_users(self, frame: "FrameType") -> bool:
        file = frame.f_code.co_filename
        if frame.f_globals.get("__name__") == "__main__":
            return True
        return not file.startswith(("<", *self._homes)) and file != __file__


def _constant(frame: "FrameType", name: str, value: str | None) -> str:
    """Whether the current line is an unindented `os.environ["NAME"] = "VALUE"` of the script: + or ?."""
    if frame.f_code.co_name != "<module>" or frame.f_globals.get("__name__") != "__main__":
        return ""
    with open(frame.f_code.co_filename, encoding="utf-8") as file:
        line = file.read().split("\n")[frame.f_lineno - 1]
    if line[:1].isspace() or value is None or "\n" in value:
        return ""
    tree: Any = compile(line, "line", "exec", _ONLY_AST)
    (statement,) = tree.body
    kind = type(statement).__name__
    if kind == "Assign":
        (target,) = statement.targets
        found = (target.value.attr, target.slice.value, statement.value.value)
        return "+" if found == ("environ", name, value) else ""
    if kind == "Expr":
        call = statement.value
        call_parts = [call.func.attr, call.func.value.attr, *(argument.value for argument in call.args)]
        return "?" if call_parts == ["setdefault", "environ", name, value] else ""
    return ""
