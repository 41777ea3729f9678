"""Why the packages of a script are preloaded or not, in words: what `phalanx warm --explain` prints."""

from __future__ import annotations

import os
import subprocess
import sys

from phalanx.agent.warm.import_cache import ImportCache, cache_dir
from phalanx.helpers.preload.packages import PACKAGES
from phalanx.helpers.preload.preload_list import NOT_LISTED, is_listed, package_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PATIENCE = 60.0  # seconds that the import of a package is measured for


def explain(program: Sequence[str], environ: Mapping[str, str]) -> str:
    """`program`: mode, target and interpreter flags, as in the cache's key."""
    cache = ImportCache(program, environ)
    first, later = _reasons(cache)
    packages = {**later, **first}
    if not packages:
        return (
            f"{program[1]}: imports no installed package at its top, and was not seen to import any later.\n"
        )
    count = sum(1 for why in packages.values() if not why)
    lines = [f"{program[1]}: {count} of {len(packages)} packages are preloaded"]
    versions = _versions()
    for package, why in packages.items():
        when = "" if package in first else " for restarts: the script imports it later"
        what = f"left to the workers: {why}" if why else f"preloaded{when}{_about(package, versions)}"
        if why == NOT_LISTED:
            seconds = _seconds_to_import(package)
            if seconds is not None:
                what += f"; each takes {seconds:.2f} s to import it, unless --preload {package}"
        lines.append(f"  {package:<20} {what}")
    constant = [entry.line[1:].partition("=")[0] for entry in cache.block if entry.line[:1] in ("+", "?")]
    if constant:
        lines.append(f"set by the script to a constant, and by the preload too: {', '.join(constant)}")
    hidden = sorted(name for name in cache.hidden if is_listed(name))
    if hidden:
        lines.append(f"hidden by files of yours: {', '.join(hidden)}")
    if cache.path is not None and os.path.exists(cache.path):
        lines.append(f"list: {cache.path}")
    return "\n".join(lines) + "\n"


def _reasons(cache: ImportCache) -> tuple[dict[str, str], dict[str, str]]:
    """Package → why it is left to the workers, or ''; of those imported at the top, and of later ones."""
    first: dict[str, str] = {}
    for entry in cache.block:
        if entry.name and entry.name.partition(".")[0] not in sys.stdlib_module_names:
            first.setdefault(package_of(entry.name), cache.why_not(entry))
    later: dict[str, str] = {}
    for line in cache.seen:
        if line[:1] not in ("=", "!") and line.partition(".")[0] not in sys.stdlib_module_names:
            package = package_of(line)
            later.setdefault(package, cache.why_not_later(package))
    # A worker is also seen to look for what is not there.
    there = _versions().keys() - first.keys()
    return first, {package: why for package, why in later.items() if package in there}


def _about(package: str, versions: Mapping[str, str]) -> str:
    version, proven = versions.get(package, "").partition("+")[0], PACKAGES.get(package, ("",))[0]
    return f" ({version}; proven with {proven})" if version and proven not in ("", version) else ""


def _versions() -> dict[str, str]:
    """Of the installed packages, by the names under which they are imported."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    found = {}
    for package, distributions in packages_distributions().items():
        try:
            found[package] = version(distributions[0])
        except PackageNotFoundError:
            pass  # removed meanwhile
    return found


def _seconds_to_import(package: str) -> float | None:
    """Measured: how long a process needs; None where it fails."""
    # Without the current directory, where anybody may have put a module (python_command.py).
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); "
        f"import time; begin = time.monotonic(); import {package}; print(time.monotonic() - begin)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
        return float(done.stdout.split()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


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
            return file.readline(1 << 16).partition("|")[0] == what
    except OSError:
        return False
