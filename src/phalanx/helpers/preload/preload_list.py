"""Which modules helpers may import in advance: those of listed packages (packages.py), and no others.

A decision is a reason in a few words why a module is left to the workers, or nothing. All of it is known
before anything is imported; what only the import itself can show is watched for by preload.py.
"""

from __future__ import annotations

import sys

from phalanx.helpers.preload.packages import LEFT_OUT, PACKAGES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Not among the imports in advance: the launcher's own, and what has an effect beyond its module.
_NEVER = frozenset({"__main__", "phalanx", "sitecustomize", "usercustomize", "antigravity", "this"})

NOT_LISTED = "not on the list of proven packages"

# Rows with a dotted name: packages of a namespace (google.protobuf), and modules that are left out.
_DOTTED = frozenset(name for name in (*PACKAGES, *LEFT_OUT) if "." in name)
_TOPS = frozenset(name.partition(".")[0] for name in _DOTTED)
_NAMESPACES = _TOPS - PACKAGES.keys() - LEFT_OUT.keys()


def package_of(name: str) -> str:
    """The package that a module belongs to, as the list names it."""
    top = name.partition(".")[0]
    if top not in _TOPS:
        return top
    inside = name
    while "." in inside:
        if inside in _DOTTED:
            return inside
        inside = inside.rpartition(".")[0]
    return name if top in _NAMESPACES else top


def is_listed(name: str) -> bool:
    """Whether a helper may import this module, as far as the list is concerned."""
    package = package_of(name)
    is_known = package in PACKAGES or package in _NAMESPACES or package in sys.stdlib_module_names
    return is_known and package not in _NEVER


def left_out(name: str, may_be_set: frozenset[str] | None) -> str:
    """Why a module is left to the workers; '' if it may be preloaded.

    `may_be_set`: variables that the user's code may have set before; None: any.
    """
    package = package_of(name)
    if not is_listed(name):
        return LEFT_OUT.get(package, NOT_LISTED)
    if package not in PACKAGES:
        return ""
    reads = sorted(reads_of(package, PACKAGES))
    if may_be_set is None:
        read = ", ".join(reads[:3]) + ", …" * (len(reads) > 3)
        why = "and your code sets variables whose names are computed"
    else:
        read = next((one for one in sorted(may_be_set) if is_read(one, reads)), "")
        why = "which your code may set"
    return (
        f"reads {read} while it is imported, {why} (if that does not matter: --preload {package})"
        if read
        else ""
    )


def reads_of(package: str, rows: Mapping[str, tuple[str, str, tuple[str, ...]]] = PACKAGES) -> set[str]:
    """The variables that its import reads."""
    found: set[str] = set()
    for word in rows[package][1].split():
        found |= reads_of(word[1:], rows) if word.startswith("@") else {word}
    return found


def names_in(lines: Iterable[str]) -> set[str]:
    """The modules in lines of a preload (preload.py)."""
    return {line.lstrip("*&").partition(":")[0] for line in lines if line[:1] not in "!-~=+?#"}


def is_read(variable: str, reads: Iterable[str]) -> bool:
    """`reads`: names, or the beginning of some (NAME*)."""
    return any(variable.startswith(word[:-1]) if word.endswith("*") else variable == word for word in reads)
