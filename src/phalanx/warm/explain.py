"""Why the packages of a script are preloaded or not, in words: what `phalanx warm --explain` prints."""

from __future__ import annotations

import os
import sys

from phalanx.warm.import_cache import ImportCache, cache_dir
from phalanx.warm.variables import variables_set_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_UNKNOWN = """\
{what}: nothing is known, so the next launch imports everything in the workers, and learns from them.
Either it was not run yet with this Python ({python}) by this user, or packages were installed or removed, a
line that sets variables or sys.path was edited, or a file with the name of a package has appeared since.
"""


class PackageReport:
    """One package of a script."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.preloaded = 0  # modules
        self.first = 0  # of these, those that a launch waits for
        self.untried = 0
        self.left_out: dict[str, str] = {}  # module → why

    def line(self) -> str:
        """In words."""
        parts = []
        if self.preloaded:
            later = " (for restarts: the script imports it later)" if not self.first else ""
            parts.append(f"preloaded{later}, {self.preloaded} module{'s' * (self.preloaded > 1)}")
        if self.untried:
            parts.append(f"not tried yet: {self.untried} module{'s' * (self.untried > 1)}")
        if self.left_out:
            parts.append(f"not preloaded: {self._reasons()}")
        return f"  {self.name:<20} {'; '.join(parts)}"

    def _reasons(self) -> str:
        own = {name: why for name, why in self.left_out.items() if not why.startswith("imports ")}
        shown = own or self.left_out
        name, why = next(iter(shown.items()))
        more = len(self.left_out) - 1
        what = f"{name} {why}" if name != self.name else why
        return f"{what} (and {more} module{'s' * (more > 1)} more)" if more else what


def explain(program: Sequence[str], environ: Mapping[str, str]) -> str:
    """`program`: mode, target and interpreter flags, as in the cache's key."""
    cache = ImportCache(program, environ)
    what = program[1]
    packages = _packages(cache)
    if not packages:
        return _UNKNOWN.format(what=what, python=sys.executable)
    early = sum(1 for package in packages.values() if package.preloaded)
    lines = [f"{what}: {early} of {len(packages)} packages are preloaded"]
    lines += [package.line() for package in packages.values()]
    lines += _about_variables(cache)
    lines.append(f"list: {cache.path}")
    return "\n".join(lines) + "\n"


def _packages(cache: ImportCache) -> dict[str, PackageReport]:
    found: dict[str, PackageReport] = {}
    first = set(cache.first_lines())

    def of(module: str) -> PackageReport | None:
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names:
            return None
        return found.setdefault(top, PackageReport(top))

    for name in cache.modules():
        package = of(name)
        if package is None:
            continue
        if cache.is_vetted(name):
            package.preloaded += 1
            package.first += name in first
        else:
            package.untried += 1
    for name, why in cache.unsuitable.items():
        package = of(name)
        if package is not None:
            package.left_out[name] = why
    return found


def _about_variables(cache: ImportCache) -> list[str]:
    constant = [line[1:].partition("=")[0] for line in cache.names if line[:1] in ("+", "?")]
    files = [line[1:] for line in cache.own_lines()]
    may_be_set = sorted(variables_set_in(files, files[0] if files else ""))
    shadowed = [line[1:] for line in cache.names if line.startswith("!")]
    lines = []
    if constant:
        lines.append(f"set by the script to a constant, and by the preload too: {', '.join(constant)}")
    if may_be_set:
        shown = ", ".join(may_be_set[:10]) + (", ..." if len(may_be_set) > 10 else "")
        lines.append(f"set by your files in some runs: {shown}; a package that reads one is not preloaded")
    if shadowed:
        lines.append(f"hidden by files of yours: {', '.join(shadowed)}")
    return lines


def forget(program: Sequence[str] | None, environ: Mapping[str, str]) -> int:
    """Remove the list of a script, for all Pythons and package states, or all lists; how many there were."""
    directory = cache_dir(environ)
    if directory is None:
        return 0
    wanted = None if program is None else ImportCache(program, environ).key.partition("|")[0]
    count = 0
    try:
        entries = sorted(os.listdir(directory))
    except OSError:
        return 0
    for entry in entries:
        path = os.path.join(directory, entry)
        if wanted is not None and not _is_about(path, wanted):
            continue
        try:
            os.unlink(path)
            count += 1
        except OSError:
            pass  # removed meanwhile, or not ours
    return count


def _is_about(path: str, what: str) -> bool:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(1 << 16).split("\n")[1].partition("|")[0] == what
    except (OSError, IndexError):
        return False
