"""Environment variables and imports: which ones a package reads, and which ones the user's code may set.

A script may set a variable before it imports a package that reads it: always, or only for some arguments. The
preload happens before the script runs. So a package that reads a variable which the user's files may set is
not preloaded; an unindented `os.environ["NAME"] = "constant"` of the script is repeated for the preload
instead (import_recorder.py).

* What Python code reads goes through os.environ, which notes it (NotedVariables).
* What C code reads with getenv cannot be seen. The name has to be somewhere in the library, so the libraries
  of a package are searched for the names that matter.
* What the user's files set is taken from their syntax trees (variables_set_in). A name that is computed, or
  read from a file, cannot be: then late_variables.py notices it while the script runs.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without the module
_SETTERS = ("setdefault", "update", "pop", "popitem", "clear", "__setitem__", "__delitem__")
_LIMIT = 1 << 20  # bytes of one of the user's files
_PIECE = 1 << 24  # bytes of a library that are searched at a time
# C code reads these when a device, a connection or a process group is made, not when it is loaded.
_READ_LATER = (
    "CUDA_",
    "NCCL_",
    "NVIDIA_",
    "GLOO_",
    "UCX_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "TORCH_NCCL_",
    "MASTER_",
)


class NotedVariables(dict[bytes, bytes]):
    """The environment while modules are imported: the names that are read are noted, with their values."""

    read: dict[bytes, bytes | None]

    def __getitem__(self, name: bytes) -> bytes:
        self.read.setdefault(name, dict.get(self, name))
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, bytes):
            self.read.setdefault(name, dict.get(self, name))
        return super().__contains__(name)

    def get(self, name: bytes, default: Any = None) -> Any:
        self.read.setdefault(name, dict.get(self, name))
        return super().get(name, default)


class VariableCheck:
    """A check of import_judge.py: a module reads a variable that the user's code may set."""

    def __init__(self, lines: Iterable[str], read: dict[bytes, bytes | None]) -> None:
        """`lines` of the list: =PATH is a file of the user, the script first."""
        files = [line[1:] for line in lines if line.startswith("=")]
        self._names = sorted(variables_set_in(files, files[0] if files else ""))
        self._keys = [os.fsencode(name) for name in self._names]
        self._read = read
        self._libraries = loaded_libraries() if self._names else set()

    def __call__(self, _module: str) -> str:
        for key in self._keys:
            if key in self._read:
                del self._read[key]  # so that the next reader is noticed
                return f"reads {os.fsdecode(key)}, which the script may set"
        if not self._names:
            return ""
        new = loaded_libraries() - self._libraries
        self._libraries |= new
        found = named_in_libraries(self._names, new)
        return f"may read {found}, which the script may set" if found else ""


# ---- the user's files ----------------------------------------------------------------------------


def variables_set_in(files: Iterable[str], script: str = "") -> set[str]:
    """The names of variables that the code in these files may set.

    Not counted: what is set to a constant by an unindented line of `script`. Where a name is computed, every
    text in the file that could be one counts. Where `dotenv` is used, the names in the file `.env` count.
    """
    found: set[str] = set()
    for path in files:
        try:
            with open(path, "rb") as file:
                text = file.read(_LIMIT)
            if b"environ" not in text and b"env" not in text:
                continue
            tree = compile(text, path, "exec", _ONLY_AST, dont_inherit=True)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        found |= _set_in(tree, is_script=path == script)
        if b"dotenv" in text:
            found |= _names_in_dotenv(os.path.dirname(path))
    return found


def _set_in(tree: Any, is_script: bool) -> set[str]:
    constant = [node for node in tree.body if is_script and _is_constant(node)]
    found: set[str] = set()
    computed = False
    for node in _nodes(tree, constant):
        names = _names_set_by(node)
        if names is None:
            computed = True
        else:
            found |= names
    if computed:
        found |= {text for text in _texts(tree) if _is_name(text)}
    return found


def _nodes(tree: Any, left_out: list[Any]) -> Iterator[Any]:
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        for field in node._fields:
            value = getattr(node, field, None)
            pending += [
                child
                for child in (value if isinstance(value, list) else [value])
                if hasattr(child, "_fields") and not any(child is one for one in left_out)
            ]


def _names_set_by(node: Any) -> set[str] | None:
    """The variables that this statement or call sets; None if their names are computed."""
    kind = type(node).__name__
    if kind in ("Assign", "AnnAssign", "AugAssign", "Delete", "For", "NamedExpr"):
        targets = node.targets if kind in ("Assign", "Delete") else [node.target]
        found: set[str] | None = set()
        for target in targets:
            if type(target).__name__ == "Subscript" and _is_environ(target.value):
                found = _and(found, _texts_of([target.slice]))
            elif _is_environ(target):  # os.environ |= ...
                found = _and(found, _texts_of([node.value]))
        if kind == "Assign" and _is_environ(node.value):
            return None  # under another name, anything may be done with it
        return found
    if kind != "Call":
        return set()
    function = node.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    words = _texts_of([argument.value for argument in node.keywords if argument.arg is None])
    if name in _SETTERS and _is_environ(getattr(function, "value", None)):
        words = _and(words, {argument.arg for argument in node.keywords if argument.arg is not None})
        return _and(words, _texts_of(node.args if name == "update" else node.args[:1]))
    if name in ("putenv", "unsetenv", "setenv"):
        return _texts_of(node.args[:1])
    return None if "dotenv" in name else set()


def _is_environ(node: Any) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in ("environ", "environb")


def _texts_of(nodes: list[Any]) -> set[str] | None:
    """The constants, and the keys of dictionaries; None if there is anything else."""
    found: set[str] = set()
    for node in nodes:
        kind = type(node).__name__
        if kind == "Constant" and isinstance(node.value, str | bytes):
            found.add(os.fsdecode(node.value))
        elif kind == "Dict" and all(key is not None for key in node.keys):
            inner = _texts_of(node.keys)
            if inner is None:
                return None
            found |= inner
        else:
            return None
    return found


def _and(one: set[str] | None, two: set[str] | None) -> set[str] | None:
    return None if one is None or two is None else one | two


def _is_constant(statement: Any) -> bool:
    """An assignment that import_recorder.py writes down, and the preload repeats."""
    try:
        if type(statement).__name__ == "Assign":
            (target,) = statement.targets
            return _is_environ(target.value) and isinstance(target.slice.value + statement.value.value, str)
        call = statement.value
        name, value = (argument.value for argument in call.args)
        return (
            call.func.attr == "setdefault" and _is_environ(call.func.value) and isinstance(name + value, str)
        )
    except (AttributeError, TypeError, ValueError):
        return False


def _texts(tree: Any) -> Iterator[str]:
    for node in _nodes(tree, []):
        if type(node).__name__ == "Constant" and isinstance(node.value, str):
            yield node.value


def _is_name(text: str) -> bool:
    return 1 < len(text) < 100 and text.isidentifier()


def _names_in_dotenv(folder: str) -> set[str]:
    found = set()
    for path in {os.path.join(folder, ".env"), os.path.abspath(".env")}:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.read(_LIMIT).splitlines()
        except OSError:
            continue
        found |= {line.partition("=")[0].removeprefix("export ").strip() for line in lines if "=" in line}
    return found


# ---- C code --------------------------------------------------------------------------------------


def loaded_libraries() -> set[str]:
    """The shared objects that this process has mapped."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            return {line[line.index("/") :].rstrip("\n") for line in file if ".so" in line and "/" in line}
    except OSError:
        return set()


def named_in_libraries(names: Iterable[str], libraries: Iterable[str]) -> str:
    """One of these variables that a library names, and so may read when it is loaded; else ''."""
    wanted = [name for name in names if not name.startswith(_READ_LATER)]
    for path in sorted(libraries) if wanted else ():
        for name in wanted:
            if _contains(path, b"\0" + os.fsencode(name) + b"\0"):
                return name
    return ""


def _contains(path: str, word: bytes) -> bool:
    rest = b""
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                if word in rest + piece[: len(word)] or word in piece:
                    return True
                rest = piece[-len(word) :]
    except OSError:
        pass
    return False
