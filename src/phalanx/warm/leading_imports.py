"""What a script imports before it does anything that can be seen from outside.

A start may wait for the preload of these modules: the script itself would import them first, so that its
first line of output, its `--help` or its exit does not come later than without a preload. The statements at
the top of a script that only import, define and set count as nothing visible; the first other statement ends
the block.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without the module
_LIMIT = 1 << 18  # bytes; a larger file takes too long to parse
_IMPORTS = ("Import", "ImportFrom")
_DEFINITIONS = ("FunctionDef", "AsyncFunctionDef", "ClassDef", "Pass", *_IMPORTS)
_VALUES = ("Assign", "AnnAssign", "AugAssign", "Expr")
# Calls between imports that take no time and show nothing.
_QUIET_CALLS = frozenset({
    "get", "getenv", "setdefault", "insert", "append", "extend", "update", "pop", "filterwarnings",
    "simplefilter", "getLogger", "get_logger", "captureWarnings", "setLevel", "Path", "resolve", "absolute",
    "join", "dirname", "abspath", "realpath", "basename", "exists", "isdir", "str", "int", "float", "bool",
    "len", "set", "dict", "list", "tuple", "frozenset", "TypeVar", "namedtuple", "lower", "strip", "split",
    "NewType", "ParamSpec", "partial", "install",
})  # fmt: skip


def leading_imports(path: str) -> tuple[int, list[str]]:
    """The last line of the block at the top of a script, and the modules that it names."""
    try:
        with open(path, "rb") as file:
            text = file.read(_LIMIT + 1)
        if len(text) > _LIMIT:
            return 0, []
        tree: Any = compile(text, path, "exec", _ONLY_AST, dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return 0, []
    end = 0
    names: list[str] = []
    for statement in tree.body:
        if not _is_quiet(statement):
            break
        end = statement.end_lineno
        names += _named(statement)
    return end, list(dict.fromkeys(names))


def _is_quiet(statement: Any) -> bool:
    kind = type(statement).__name__
    if kind in _DEFINITIONS:
        return True
    if kind in _VALUES:
        return all(_is_quiet_call(node) for node in _nodes(statement))
    if kind == "If":
        inside = [*statement.body, *statement.orelse]
        return all(map(_is_quiet_call, _nodes(statement.test))) and all(map(_is_quiet, inside))
    if kind == "Try":
        handlers = [part for handler in statement.handlers for part in handler.body]
        return all(map(_is_quiet, [*statement.body, *handlers, *statement.orelse, *statement.finalbody]))
    return False


def _is_quiet_call(node: Any) -> bool:
    kind = type(node).__name__
    if kind in ("Await", "Yield", "YieldFrom"):
        return False
    if kind != "Call":
        return True
    name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
    return name in _QUIET_CALLS


def _named(statement: Any) -> Iterator[str]:
    """The modules that a statement imports when it is executed, as far as it names them."""
    for node in _nodes(statement, ("FunctionDef", "AsyncFunctionDef", "Lambda")):
        if type(node).__name__ == "Import":
            yield from (alias.name for alias in node.names)
        elif type(node).__name__ == "ImportFrom":
            yield f"{'.' * node.level}{node.module or ''}"


def _nodes(node: Any, but: tuple[str, ...] = ("Lambda",)) -> Iterator[Any]:
    if type(node).__name__ in but:
        return
    yield node
    for field in node._fields:
        inside = getattr(node, field, None)
        for part in inside if isinstance(inside, list) else [inside]:
            if hasattr(part, "_fields"):
                yield from _nodes(part, but)
