"""Examine packages, and write what was found into the list and the page.

    python -m tests.warm_packages [--kept | --judge] [--python PYTHON] [--folder FOLDER] [PACKAGE ...]

A clean environment for each package, or the one whose Python is named. It is observed; if nothing speaks
against it, a script that imports it is launched four times, with a list that has it. Unless
all launches are the same, and were preloaded, it is left out. What was found is kept in FOLDER:
with --kept, packages that were examined there before are not examined again, and count for the result.
Without names, all packages: rows that none of them has are dropped. --judge examines nothing: the list is
written from what is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.warm_packages.environments import Environments
from tests.warm_packages.four_starts import four_starts
from tests.warm_packages.judgement import Judgement
from tests.warm_packages.observation import observe
from tests.warm_packages.packages import PACKAGES, REMARKS
from tests.warm_packages.tables import LIST, SOURCE, rewrite_list, rewrite_page, shipped


def examine(package: str, python: str, environments: Environments | None) -> dict[str, Any]:
    """What was found about one package, as it is kept."""
    modules = PACKAGES.get(package, [package])
    found: dict[str, Any] = {
        "package": package,
        "modules": modules,
        "observed": [],
        "starts": "",
        "failed": "",
    }
    began = time.monotonic()
    try:
        if package in REMARKS:
            raise ValueError(REMARKS[package])
        if environments is not None:
            python = environments.make(package)
        found["observed"] = observe(python, modules, environments and environments.compiled)
        found["starts"] = launched(python, found)
    except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
        found["failed"] = f"{error}"[:300].replace("\n", " ").replace("|", "/")
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def launched(python: str, found: dict[str, Any], path: Path | None = None) -> str:
    """What four launches show: "same", or why they prove nothing. Empty: what was observed speaks against it.

    They have a list of their own, with this package. `path`: a directory with more modules.
    """
    package, modules = found["package"], found["modules"]
    judgement = judge({package: {**found, "starts": "same"}})
    if modules[0] in judgement.left_out:
        return ""
    with tempfile.TemporaryDirectory(prefix="warm-packages") as folder:
        copy = Path(folder, "src")
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        rewrite_list(judgement, everything=False, target=copy / LIST.relative_to(SOURCE))
        return four_starts(python, package, modules, [copy, *([path] if path else [])]).verdict()


def judge(findings: dict[str, dict[str, Any]]) -> Judgement:
    """All of them together. What was not launched, or in vain, is not proven."""
    judgement = Judgement()
    unproven = {}
    for found in findings.values():
        why = found["starts"] or found["failed"]
        if why != "same":
            unproven[found["modules"][0]] = f"not proven: {why or 'its launches were not compared'}"
        if found["observed"]:
            judgement.add(
                *found["observed"], unproven[found["modules"][0]] if why not in ("", "same") else ""
            )
    judgement.settle()
    for found in findings.values():
        if not found["observed"]:
            judgement.left_out.setdefault(found["modules"][0], found["failed"])
    for name, why in unproven.items():
        judgement.rows.pop(name, None)
        judgement.left_out.setdefault(name, why)
    return judgement


def results(findings: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """package → version and result, for the page."""
    rows, left_out = shipped()
    table = {}
    for package, found in findings.items():
        modules = found["modules"]
        # A submodule stands for the package where it is what was asked for.
        reasons = {name: why for one in modules for name, why in left_out.items() if _covers(name, one)}
        version = next((rows[row][0] for row in rows if any(_covers(row, one) for one in modules)), "–")
        for seen in found["observed"][1:]:
            row = seen["rows"].get(modules[0], "")
            version = seen["versions"].get(row, ["", version])[1].partition("+")[0]
        if not reasons:
            result = "preloaded"
        elif any(_covers(name, modules[0]) for name in reasons):
            result = f"imported by the workers: {next(iter(reasons.values()))}"
        else:
            result = "preloaded, except for " + ", ".join(f"{name} ({why})" for name, why in reasons.items())
        table[package] = version, result.replace("|", "/")
    return table


def _covers(name: str, module: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def main(words: list[str]) -> int:
    """Returns 1 if the four starts of a package differ, or prove nothing."""
    parser = argparse.ArgumentParser(prog="python -m tests.warm_packages", description=__doc__)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument("--python", default="", help="of an environment that is there")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "phalanx-tests" / "packages")
    parser.add_argument("--kept", action="store_true", help="use what was observed before")
    parser.add_argument("--judge", action="store_true", help="write the list from what was kept")
    options = parser.parse_args(words)
    kept = options.folder.absolute() / "found"
    kept.mkdir(parents=True, exist_ok=True)
    findings = {}
    if options.kept or options.judge:
        findings = {path.stem: json.loads(path.read_text()) for path in sorted(kept.glob("*.json"))}
    if options.judge:
        write(findings, everything=True)
        return 0
    environments = None if options.python else Environments(options.folder.absolute())
    bad = 0
    for package in options.packages or PACKAGES:
        if package in findings and not options.packages:
            continue
        found = examine(package, options.python, environments)
        (kept / f"{package}.json").write_text(json.dumps(found))
        findings[package] = found
        bad += found["starts"] not in ("", "same")
        print(f"{package}: {found['seconds']:.0f} s {found['failed']}", file=sys.stderr, flush=True)
        write(findings, everything=set(PACKAGES) <= set(findings))
    return 1 if bad else 0


def write(findings: dict[str, dict[str, Any]], everything: bool) -> None:
    """Into the list and the page."""
    rewrite_list(judge(findings), everything)
    order = [name for name in PACKAGES if name in findings]
    rewrite_page(results({name: findings[name] for name in order}), everything)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
