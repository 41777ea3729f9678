"""What a script imports before it does anything that can be seen from outside; read, not executed.

A start may wait for the preload of these modules: the script itself would import them first, so that its
first line of output, its `--help` or its exit does not come later than without a preload. The statements at
the top of a script that only import, define and set count as nothing visible; the first other statement ends
the block. Statements under an `if` are not followed: whether they are executed is not known.

The user's own modules that are imported there are read as well, all of their top level, in the same order.
They are never imported.

Variables. A script may set one before an import takes effect. As a constant on an unindented line of the
script, the preload sets it, too. Any other that the code may have set by then is noted beside each import: a
package that reads it is left to the workers (preload_list.py).

The result is a list of entries, in the order of execution:

    NAME             import NAME
    NAME:one,two     from NAME import one, two
    +NAME=VALUE      the script sets this variable here; ?NAME=VALUE: only if it is not set
    #                from here on, the script may have chosen what is shown of warnings and messages
"""

from __future__ import annotations

import os

from phalanx.core.record import Record
from phalanx.helpers.preload.import_recorder import loads_code
from phalanx.helpers.preload.variables import constant_set_by, names_set_by, nodes_of, parse, variables_set_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

_MOST_OWN = 200  # files of the user that are read; with more, the rest of the block is not followed
_IN_LINE = (
    "FunctionDef", "AsyncFunctionDef", "ClassDef", "Pass", "Assign", "AnnAssign", "AugAssign", "Expr"
)  # fmt: skip
# Calls between imports that take no time and show nothing.
_QUIET_CALLS = frozenset({
    "get", "getenv", "setdefault", "insert", "append", "extend", "update", "pop", "filterwarnings",
    "simplefilter", "getLogger", "get_logger", "captureWarnings", "setLevel", "Path", "resolve", "absolute",
    "join", "dirname", "abspath", "realpath", "basename", "exists", "isdir", "str", "int", "float", "bool",
    "len", "set", "dict", "list", "tuple", "frozenset", "TypeVar", "namedtuple", "lower", "strip", "split",
    "NewType", "ParamSpec", "partial", "install", "dataclass", "field", "lru_cache",
})  # fmt: skip
# Methods of sys.path that put a directory in front of the installed packages.
_HIDING = ("insert", "extend", "clear", "remove", "pop", "reverse", "sort")


class LeadingImport(Record):
    """One entry, and the variables that the user's code may have set by then; None: any."""

    line: str
    may_be_set: frozenset[str] | None = frozenset()

    @property
    def name(self) -> str:
        """The module; empty for other entries."""
        return "" if self.line[:1] in ("+", "?", "#") else self.line.partition(":")[0]


_MARK = LeadingImport("#")


class LeadingImports:
    """The block of one program."""

    def __init__(self, search: Sequence[str], homes: tuple[str, ...]) -> None:
        """`search`: where modules are found, the script's directory first; `homes`: of installed packages."""
        self.entries: list[LeadingImport] = []
        self.own: list[str] = []  # the user's files that were read
        self.edits_path = False  # an installed package may be hidden by one that cannot be named in advance
        self._search = [path for path in search if not os.path.join(path, "").startswith(homes)]
        self._may_be_set: frozenset[str] | None = frozenset()
        self._modules: set[str] = set()  # of the user, that were read

    def read_script(self, path: str) -> None:
        """The program, or one file that stands for it."""
        tree = self._tree(path)
        if tree is not None:
            self._follow(tree, "", is_script=True)

    def read_code(self, text: str) -> None:
        """`-c`."""
        tree = parse(text)
        if tree is not None:
            self._follow(tree, "", is_script=True)

    def read_module(self, name: str) -> None:
        """`-m`, or the module of a function: its packages come first."""
        for place in _prefixes(name):
            self._read_own(place, may_be_program=place == name)

    # -- one file ---------------------------------------------------------------------------------

    def _tree(self, path: str) -> Any:
        if len(self.own) >= _MOST_OWN or not os.path.isfile(path):
            return None  # what is in a pipe could not be read again
        self.own.append(path)
        try:
            with open(path, "rb") as file:
                return parse(file.read(), path)
        except OSError:
            return None

    def _follow(self, tree: Any, package: str, is_script: bool) -> None:
        for statement in tree.body:
            if is_script and not _is_quiet(statement):
                return
            for step in _steps(statement):
                if not self._step(step, package, is_script and step is statement):
                    return

    def _step(self, statement: Any, package: str, is_plain: bool) -> bool:
        """Take in one statement; False where nothing can be said of what follows."""
        kind = type(statement).__name__
        if kind == "Import":
            for alias in statement.names:
                self._imports(alias.name, ())
        elif kind == "ImportFrom":
            name = _absolute(statement, package)
            if name:
                self._imports(name, tuple(alias.name for alias in statement.names if alias.name != "*"))
        else:
            self.edits_path = self.edits_path or _hides_modules(statement)
            constant = constant_set_by(statement) if is_plain else None
            if constant is not None:
                word, name, value = constant
                if loads_code(name) or not value.isprintable():
                    return False  # never set in a helper; what follows may depend on it
                self.entries.append(LeadingImport(f"{word}{name}={value}"))
                return True
            if _MARK not in self.entries and any(map(_may_choose, nodes_of(statement))):
                self.entries.append(_MARK)
        self._may_be_set = _either(self._may_be_set, names_set_by(statement))
        return True

    def _imports(self, name: str, parts: tuple[str, ...]) -> None:
        own = [place for place in _prefixes(name) if self._read_own(place)]
        if own:
            for part in parts if own[-1] == name else ():
                self._read_own(f"{name}.{part}")
        elif not self._place(name.partition(".")[0]):
            line = f"{name}:{','.join(parts)}" if parts else name
            self.entries.append(LeadingImport(line, self._may_be_set))

    # -- the user's own modules -------------------------------------------------------------------

    def _read_own(self, name: str, may_be_program: bool = False) -> bool:
        """Follow a module of the user; False where it is none."""
        path = self._place(name)
        if not path:
            return False
        if name not in self._modules and path.endswith(".py"):
            self._modules.add(name)
            is_package = os.path.basename(path) == "__init__.py"
            package = name if is_package else name.rpartition(".")[0]
            tree = self._tree(path)
            if tree is None:
                self._may_be_set = None
            elif may_be_program:
                self._follow(tree, package, is_script=True)
            else:
                # Its functions may be called by then, so that all that it may set counts.
                self._may_be_set = _either(self._may_be_set, variables_set_in([path]))
                self._follow(tree, package, is_script=False)
        return True

    def _place(self, name: str) -> str:
        """The file of a module of the user's, or the directory of a namespace package; '' for others."""
        inside = name.replace(".", "/")
        for folder in self._search:
            base = os.path.join(folder, inside)
            for path in (f"{base}/__init__.py", f"{base}.py"):
                if os.path.isfile(path):
                    return path
            if os.path.isdir(base) and _has_modules(base):
                return base
        return ""


def _has_modules(folder: str) -> bool:
    try:
        return any(name.endswith(".py") for name in os.listdir(folder))
    except OSError:
        return False


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _absolute(statement: Any, package: str) -> str:
    """The module of a `from` statement; '' where it is outside of any package."""
    if not statement.level:
        return statement.module or ""
    parts = package.split(".") if package else []
    if statement.level - 1 >= len(parts):
        return ""
    base = parts[: len(parts) - statement.level + 1]
    return ".".join([*base, *([statement.module] if statement.module else [])])


def _either(one: frozenset[str] | None, two: Iterable[str] | None) -> frozenset[str] | None:
    return None if one is None or two is None else one.union(two)


def _steps(statement: Any) -> Iterator[Any]:
    """The statement, or those in a `try` that are always begun; of an `if`, only what it may set counts."""
    if type(statement).__name__ != "Try":
        yield statement
        return
    for inside in [*statement.body, *statement.orelse, *statement.finalbody]:
        yield from _steps(inside)


def _hides_modules(statement: Any) -> bool:
    """Whether it may put a directory in front of the installed packages."""
    for node in nodes_of(statement):
        kind = type(node).__name__
        if kind == "Call" and getattr(node.func, "attr", "") in _HIDING and _is_path(node.func.value):
            return True
        if kind == "Call" and getattr(node.func, "attr", getattr(node.func, "id", "")) == "addsitedir":
            return True
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if kind in ("Assign", "AugAssign"):
            for target in targets:
                if _is_path(target) or _is_path(getattr(target, "value", None)):
                    return True
    return False


def _is_path(node: Any) -> bool:
    return getattr(node, "attr", "") in ("path", "meta_path", "path_hooks", "modules") and (
        getattr(getattr(node, "value", None), "id", "") == "sys"
    )


def _is_quiet(statement: Any) -> bool:
    kind = type(statement).__name__
    if kind in ("Import", "ImportFrom"):
        return True
    if kind in _IN_LINE:
        return all(map(_is_quiet_call, nodes_of(statement)))
    if kind == "If":
        inside = [*statement.body, *statement.orelse]
        return all(map(_is_quiet_call, nodes_of(statement.test))) and all(map(_is_quiet, inside))
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


def _may_choose(node: Any) -> bool:
    """Whether it may filter or redirect what an import shows: a call, or a value for an attribute."""
    kind, stores = type(node).__name__, type(getattr(node, "ctx", None)).__name__ != "Load"
    return kind == "Call" or (kind in ("Attribute", "Subscript") and stores)


def leading_imports(
    program: Sequence[str], search: Sequence[str], homes: tuple[str, ...], find: Callable[[str], str]
) -> LeadingImports:
    """`program`: mode and target; `find`: the file of an installed module that is a program, or ''."""
    found = LeadingImports(search, homes)
    mode, target = program[0], program[1]
    if mode == "script":
        path = target if not os.path.isdir(target) else os.path.join(target, "__main__.py")
        found.read_script(os.path.realpath(path))
    elif mode == "code":
        found.read_code(target)
    else:  # a module, or a function of one
        found.read_module(target.partition(":")[0])
        if not found.own and mode == "module" and (path := find(target)):
            found.read_script(path)
    return found
