"""`python -m bench [--quick] [--against CHECKOUT] [row …]` measures, prints a table and writes JSON.

No row asserts: a missed target is a NO in the table, and the exit code is 0 anyway. Figures of a busy machine
are noise, so the conditions are printed and written with the result. With `--against`, every sample is also
taken with the phalanx of another checkout, in turn, and the table shows both medians and their ratio.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.measure import OTHER, Row, compare_against, has_torch, sides, with_unit

RESULTS = Path(__file__).parent / "results"
_NAMES = "BENCH_NAMES"


@dataclass(frozen=True)
class Group:
    """Rows that one function of one module measures together."""

    rows: tuple[str, ...]
    module: str
    function: str = "run"
    needs_torch: bool = False


GROUPS = (
    Group(("launch", "exit"), "bench.launch", "bare"),
    Group(("launch-torch",), "bench.launch", "torch", needs_torch=True),
    Group(("detect", "restart"), "bench.restart", "bare"),
    Group(("restart-torch",), "bench.restart", "torch", needs_torch=True),
    Group(("standby",), "bench.restart", "standby"),
    Group(("early-kill",), "bench.warm", "kills", needs_torch=True),
    Group(("launches",), "bench.warm", "launches", needs_torch=True),
    Group(("first-line", "help"), "bench.warm", "first_lines", needs_torch=True),
    Group(("wait-for-rank",), "bench.wait_for_rank", needs_torch=True),
    Group(("reenter",), "bench.reenter", needs_torch=True),
    Group(("inprocess",), "bench.inprocess", needs_torch=True),
    Group(("keep-warm",), "bench.keep_warm", needs_torch=True),
    Group(("memory", "idle"), "bench.idle"),
    Group(("orphans",), "bench.launch", "orphans"),
    Group(("line",), "bench.launch", "line"),
    Group(("functions",), "bench.processes", "functions"),
    Group(("wait",), "bench.processes", "waits"),
    Group(("value",), "bench.processes", "value"),
    Group(("nodes", "nodes-exit"), "bench.cluster", "forming"),
    Group(("last-call", "join"), "bench.cluster", "joining"),
    Group(("loss",), "bench.cluster", "losing"),
    Group(("handlers",), "bench.cluster", "handlers"),
    Group(("tee", "latency"), "bench.tee"),
    Group(("store",), "bench.torch_store", needs_torch=True),
    Group(("timers",), "bench.timers", needs_torch=True),
    Group(("heartbeat",), "bench.heartbeat", "calls"),
    Group(("health",), "bench.heartbeat", "probes"),
)


def measure(group: Group, quick: bool) -> list[Row] | str:
    """The rows of a group, or why there are none."""
    if group.needs_torch and not has_torch():
        return "needs torch"
    try:
        module = importlib.import_module(group.module)
        if hasattr(module, "missing") and (why := module.missing()):
            return str(why)
        rows: list[Row] = getattr(module, group.function)(quick)
        return rows
    except Exception as error:  # noqa: BLE001 - one broken group must not end the run
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}"


def conditions(quick: bool, against: str | None) -> dict[str, Any]:
    """What the figures depend on, other than the code."""
    cpu = next(
        (line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),  # noqa: SIM115
        platform.machine(),
    )
    versions = {}
    for name in ("phalanx", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        **({"against": os.path.abspath(against)} if against else {}),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "names": os.environ.get(_NAMES, "from the system"),
        **versions,
    }


def head() -> str:
    """The first line of the table."""
    against = f"{OTHER:>11}{'to other':>10}" if OTHER in sides() else ""
    return f"{'what':<66}{'torch':>11}{'phalanx':>11}{'ratio':>8}{'target':>15}  met{against}"


def text(row: Row) -> str:
    """One line of the table, and a line for each note."""
    met = {True: "yes", False: "NO", None: "-"}[row.met]
    ours, theirs = with_unit(row.ours, row.unit), with_unit(row.theirs, row.unit)
    line = f"{row.what:<66}{theirs:>11}{ours:>11}{_ratio(row.ratio):>8}{row.goal:>15}  {met:<3}"
    if OTHER in sides():
        line += f"{with_unit(row.other, row.unit):>11}{_ratio(row.against):>10}"
    return "\n".join([line.rstrip(), *(f"    {note}" for note in row.notes)])


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def with_local_names(arguments: list[str]) -> int | None:
    """Run this program again with /etc/hosts naming 127.0.0.1; None if that is not possible.

    torch looks up the name of every peer. If a name server drops the request, the figure would be its timeout
    (5 s), and the comparison would be unfair to torch.
    """
    if _NAMES in os.environ:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
        hosts.write(Path("/etc/hosts").read_text() + "\n127.0.0.1 localhost\n::ffff:127.0.0.1 localhost\n")
        for number in (1, 2):  # the hosts of tests/support/netns.py
            hosts.write(f"10.77.0.{number} host{number}\n::ffff:10.77.0.{number} host{number}\n")
        hosts.flush()
        inside = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', hosts.name]
        try:
            subprocess.run([*inside, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        again = [*inside, sys.executable, "-m", "bench", *arguments]
        return subprocess.run(again, env={**os.environ, _NAMES: "local"}, check=False).returncode


def main() -> int:
    """Run the rows."""
    known = [row for group in GROUPS for row in group.rows]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples: an impression, not a result")
    parser.add_argument("--against", metavar="CHECKOUT", help="measure the phalanx of another checkout, too")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"any of: {', '.join(known)} (default: all)")
    options = parser.parse_args()
    unknown = set(options.rows) - set(known)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such row; use {', '.join(known)}")
    if options.against:
        if not os.path.isdir(os.path.join(options.against, "src", "phalanx")):
            parser.error(f"--against {options.against}: not a checkout (no src/phalanx)")
        compare_against(options.against)
    code = with_local_names(sys.argv[1:])
    if code is not None:
        return code
    begin, about = time.monotonic(), conditions(options.quick, options.against)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    if not has_torch():
        print("torch is not installed: no comparison with it")
    if options.against:
        print(
            "to other: phalanx divided by other; in rows with /s or MB/s more is better, in all others less"
        )
    print(f"\n{head()}\n{'-' * len(head())}", flush=True)
    results: list[dict[str, Any]] = []
    for group in GROUPS:
        if options.rows and not set(options.rows) & set(group.rows):
            continue
        start = time.monotonic()
        found = measure(group, options.quick)
        took = time.monotonic() - start
        if isinstance(found, str):
            print(f"{' '.join(group.rows)}: {found}", flush=True)
            results.append({"key": group.rows[0], "missing": found})
            continue
        for row in found:
            if not options.rows or row.key in options.rows:
                print(text(row), flush=True)
                results.append({**row.as_json(), "took": took})
    about["load_after"] = os.getloadavg()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}{'-quick' if options.quick else ''}.json"
    path.write_text(json.dumps({"conditions": about, "rows": results}, indent=2) + "\n")
    shown = os.path.relpath(path)
    print(f"\n{time.monotonic() - begin:.0f} s; load now {os.getloadavg()[0]:.1f}; written to {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
