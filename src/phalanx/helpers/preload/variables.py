"""Which environment variables the user's code may set, from its syntax trees.

A script may set a variable before it imports a package that reads it: always, or only for some arguments. The
preload happens before the script runs, so such a package is left to the workers. Which variables a package
reads while it is imported is part of the list of packages (packages.py).

A name that is computed or read from a file cannot be known: then the code may set any variable (None).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator
    from typing import Any

_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without the module
_SETTERS = ("setdefault", "update", "pop", "popitem", "clear", "__setitem__", "__delitem__")
_OF_OS = ("environ", "environb", "putenv", "unsetenv")
_LIMIT = 1 << 20  # bytes of a file
# Expressions, parts of statements and calls that read os.environ and keep no reference to it.
_READERS = ("Attribute", "Subscript", "Compare", "BinOp", "UnaryOp", "Starred", "FormattedValue", "Expr")
_READ_OR_SET = ("test", "iter", "target", "targets")
_COPIERS = ("dict", "list", "set", "tuple", "sorted", "len", "str", "repr", "print", "pprint")


def parse(text: bytes | str, path: str = "program") -> Any:
    """The syntax tree; None for what is not Python, or too large to read while a launch waits."""
    if len(text) > _LIMIT:
        return None
    try:
        return compile(text, path, "exec", _ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def variables_set_in(files: Iterable[str], constants: Container[str] = ()) -> frozenset[str] | None:
    """The variables that the code in these files may set, anywhere in them.

    Not counted: unindented lines that set one of `constants`, which the preload sets, too.
    """
    found: frozenset[str] = frozenset()
    for path in files:
        try:
            with open(path, "rb") as file:
                text = file.read(_LIMIT + 1)
        except OSError:
            continue
        if b"env" not in text:
            continue
        tree = parse(text, path)
        if tree is None:
            if len(text) > _LIMIT:
                return None
            continue
        body = [
            node for node in tree.body if "{}{}={}".format(*constant_set_by(node) or "   ") not in constants
        ]
        names = _set_in(node for statement in body for node in nodes_of(statement, called=True))
        if names is None:
            return None
        found |= names
    return found


def names_set_by(statement: Any) -> frozenset[str] | None:
    """The variables that this statement may set when it is executed; functions in it are not called."""
    return _set_in(nodes_of(statement))


def constant_set_by(statement: Any) -> tuple[str, str, str] | None:
    """`os.environ["NAME"] = "VALUE"` ("+", name, value), or the same with setdefault ("?")."""
    try:
        if type(statement).__name__ == "Assign":
            (target,) = statement.targets
            word, environ, name, value = "+", target.value, target.slice.value, statement.value.value
        else:
            call = statement.value
            word, environ = "?", call.func.value
            name, value = (argument.value for argument in call.args)
            if call.func.attr != "setdefault" or call.keywords:
                return None
    except (AttributeError, TypeError, ValueError):
        return None
    is_text = isinstance(name, str) and isinstance(value, str)
    return (word, name, value) if is_text and _is_environ(environ) else None


def constants_in(lines: Iterable[str]) -> frozenset[str]:
    """The lines of a preload that set a variable; of several for the same one, the last."""
    return frozenset({line[1:].partition("=")[0]: line for line in lines if line[:1] in ("+", "?")}.values())


def lines_of(may_be_set: frozenset[str] | None) -> list[str]:
    """The lines of a preload that say which variables may have been set."""
    return ["~*"] if may_be_set is None else [f"~{name}" for name in sorted(may_be_set)]


class _NotConstant(Exception):
    """The name of a variable cannot be known."""


def _set_in(nodes: Iterable[Any]) -> frozenset[str] | None:
    try:
        return frozenset().union(*map(_set_by_node, nodes))
    except _NotConstant:
        return None


def nodes_of(tree: Any, called: bool = False) -> Iterator[Any]:
    """The nodes of a statement that are executed with it; `called`: those of its functions, too."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        for decorator in getattr(node, "decorator_list", ()):  # it may be a lambda, which is called at once
            yield from nodes_of(decorator, called=True)
        is_function = type(node).__name__ in ("FunctionDef", "AsyncFunctionDef", "Lambda")
        for field in node._fields:
            if is_function and field == "body" and not called:
                continue  # but decorators and defaults
            value = getattr(node, field, None)
            pending += [
                child
                for child in (value if isinstance(value, list) else [value])
                if hasattr(child, "_fields")
            ]


def _set_by_node(node: Any) -> set[str]:
    """The variables that this statement or call sets; _NotConstant if their names are."""
    kind = type(node).__name__
    if _hands_on(node, kind):
        raise _NotConstant  # under another name, anything may be done with it
    if kind in ("Assign", "AnnAssign", "AugAssign", "Delete", "For", "NamedExpr"):
        found: set[str] = set()
        for target in node.targets if kind in ("Assign", "Delete") else [node.target]:
            if type(target).__name__ == "Subscript" and _is_environ(target.value):
                found |= _texts_of([target.slice])
            elif _is_environ(target):  # os.environ |= ...
                found |= _texts_of([node.value])
        return found
    if kind == "ImportFrom" and any(alias.asname and alias.name in _OF_OS for alias in node.names):
        raise _NotConstant
    if kind != "Call":
        return set()
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if "dotenv" in name:
        raise _NotConstant
    if _is_setter(node.func):
        words = {argument.arg for argument in node.keywords if argument.arg is not None}
        more = [argument.value for argument in node.keywords if argument.arg is None]
        return words | _texts_of(more + (node.args if name == "update" else node.args[:1]))
    return _texts_of(node.args[:1]) if name in ("putenv", "unsetenv", "setenv") else set()


def _hands_on(node: Any, kind: str) -> bool:
    """Whether something else gets os.environ itself, or a function that sets it."""
    if kind in _READERS:
        return False
    if kind == "Constant":  # getattr(os, "environ"), patch.dict("os.environ")
        return node.value in ("environ", "environb", "os.environ")
    if kind == "Call":
        copies = getattr(node.func, "id", "") in _COPIERS or getattr(node.func, "attr", "") == "update"
        parts = [] if copies else node.args
    elif kind == "Dict":
        parts = [value for key, value in zip(node.keys, node.values, strict=True) if key is not None]
    elif kind == "keyword":
        parts = [] if node.arg in (None, "env") else [node.value]
    else:
        fields = [getattr(node, field, None) for field in node._fields if field not in _READ_OR_SET]
        parts = [part for field in fields for part in (field if isinstance(field, list) else [field])]
    return any(_is_environ(part) or _is_setter(part) for part in parts)


def _is_setter(node: Any) -> bool:
    return getattr(node, "attr", "") in _SETTERS and _is_environ(node.value)


def _is_environ(node: Any) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in ("environ", "environb")


def _texts_of(nodes: list[Any]) -> set[str]:
    """The constants, and the keys of dictionaries; _NotConstant if there is anything else."""
    found: set[str] = set()
    for node in nodes:
        kind = type(node).__name__
        if kind == "Constant" and isinstance(node.value, str | bytes):
            found.add(os.fsdecode(node.value))
        elif kind == "Dict" and None not in node.keys:
            found |= _texts_of(node.keys)
        else:
            raise _NotConstant
    return found
