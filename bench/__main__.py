"""The driver: `python -m bench [--quick] [row …]` runs the rows, prints the table, and keeps all as JSON.

No row asserts: a missed target is a NO in the table, and the exit code is 0 all the same. The figures of a
busy machine are noise; the conditions are printed, and kept with the result, for that reason.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.measure import OURS, THEIRS, Row, Target, has_torch, in_words

RESULTS = Path(__file__).parent / "results"
_NAMES = "BENCH_NAMES"


@dataclass(frozen=True)
class Group:
    """Rows that one function of one module measures together."""

    rows: tuple[str, ...]
    module: str
    function: str = "run"
    adapt: Callable[[dict[str, Any]], list[Row]] | None = None  # for a module that does not return rows
    needs_torch: bool = False


def _tee(report: dict[str, Any]) -> list[Row]:
    rows = []
    for case, found in report["throughput"].items():
        row = Row("tee", f"tee, 4 writers, {case}", "s", Target(1 / 2))
        lost = Row("tee", f"tee, 4 writers, {case}: lines missing, doubled or torn", "", Target(0, "value"))
        for side, attribute in ((OURS, "ours"), (THEIRS, "theirs")):
            if side in found:
                setattr(row, attribute, found[side]["seconds"])
                setattr(lost, attribute, sum(found[side][k] for k in ("missing", "doubled", "torn")))
        row.notes.append(f"{found['megabytes']:.0f} MB")
        rows += [row, lost]
    late = report["latency"]
    rows.append(
        Row(
            "latency",
            "line written to a followed file → in the pipe",
            "s",
            Target(0.010, "value"),
            ours=late[OURS]["median"],
            theirs=late.get(THEIRS, {}).get("median"),
            notes=[f"ours at most {in_words(late[OURS]['max'], 's')}"],
        )
    )
    return rows


def _store(report: dict[str, Any]) -> list[Row]:
    rows = []
    for clients, target in ((1, None), (32, Target(1 / 2, least=True))):
        for name, found in report[f"throughput_{clients}"].items():
            what = f"torch store, {name}, {clients} client{'s' * (clients > 1)}"
            rows.append(Row("store", what, "/s", target, ours=found[OURS], theirs=found[THEIRS]))
    found = report["barrier_64"]
    what = "torch store, barrier of 64 clients"
    rows.append(Row("store", what, "s", Target(1), ours=found[OURS], theirs=found[THEIRS]))
    return rows


def _timers(report: dict[str, Any]) -> list[Row]:
    rows = []
    for kind, found in report["pairs_per_s"].items():
        what = f"timers, {kind}: acquire+release pairs, end to end"
        rows.append(Row("timers", what, "/s", Target(5, least=True), ours=found[OURS], theirs=found[THEIRS]))
    for kind, found in report["late_ms"].items():
        slow = report["torch_late_ms_default_interval"].get(kind)
        row = Row("timers", f"timers, {kind}: expiry → worker signalled", "s", Target(0.005, "value"))
        row.ours, row.theirs = found[OURS] / 1e3, found[THEIRS] / 1e3
        if slow is not None:
            row.notes.append(f"{THEIRS} with its default interval: {in_words(slow / 1e3, 's')}")
        rows.append(row)
    return rows


def _heartbeat(report: dict[str, Any]) -> list[Row]:
    rows = []
    for call, limit in (
        ("heartbeat", 2e-6),
        ("should_checkpoint", None),
        ("section", None),
        ("expires", None),
    ):
        target = None if limit is None else Target(limit, "value")
        rows.append(
            Row("heartbeat", f"worker.{call}(), a call", "s", target, ours=report["inside"][call] / 1e6)
        )
    slowest = report["probes, milliseconds"]["slowest"] / 1e3
    what = "/healthz while twice as many workers as processors spin, slowest"
    rows.append(Row("health", what, "s", Target(0.1, "value"), ours=slowest))
    return rows


GROUPS = (
    Group(("launch", "exit"), "bench.launch", "bare"),
    Group(("launch-torch",), "bench.launch", "torch", needs_torch=True),
    Group(("detect", "restart"), "bench.restart", "bare"),
    Group(("restart-torch",), "bench.restart", "torch", needs_torch=True),
    Group(("standby",), "bench.restart", "standby"),
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
    Group(("tee", "latency"), "bench.tee", adapt=_tee),
    Group(("store",), "bench.torch_store", adapt=_store, needs_torch=True),
    Group(("timers",), "bench.timers", adapt=_timers, needs_torch=True),
    Group(("heartbeat", "health"), "bench.heartbeat", adapt=_heartbeat),
)


def measure(group: Group, quick: bool) -> list[Row] | str:
    """The rows of a group, or why there are none."""
    if importlib.util.find_spec(group.module) is None:
        return "not there"
    if group.needs_torch and not has_torch():
        return "needs torch"
    try:
        found = getattr(importlib.import_module(group.module), group.function)(quick)
        return group.adapt(found) if group.adapt else found
    except Exception as error:  # noqa: BLE001 - one broken row must not cost the others
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}"


def conditions(quick: bool) -> dict[str, Any]:
    """What the figures depend on besides the code."""
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
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "names": os.environ.get(_NAMES, "as this machine has them"),
        **versions,
    }


HEAD = f"{'what':<66}{'torch':>11}{'ours':>11}{'ratio':>8}{'target':>13}  met"


def text(row: Row) -> str:
    """One line of the table, and a line for each note."""
    ratio = "-" if row.ratio is None else f"{row.ratio:.3f}" if row.ratio < 10 else f"{row.ratio:.1f}"
    met = {True: "yes", False: "NO", None: "-"}[row.met]
    ours, theirs = in_words(row.ours, row.unit), in_words(row.theirs, row.unit)
    line = f"{row.what:<66}{theirs:>11}{ours:>11}{ratio:>8}{row.goal:>13}  {met}"
    return "\n".join([line, *(f"    {note}" for note in row.notes)])


def with_local_names(arguments: list[str]) -> int | None:
    """Run again where 127.0.0.1 has its name without a name server; None where that cannot be had.

    torch looks up the name of every peer. Where a name server drops the question, the figure would be its
    timeout (5 s), and the comparison would flatter us.
    """
    if _NAMES in os.environ:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
        hosts.write(Path("/etc/hosts").read_text() + "\n127.0.0.1 localhost\n::ffff:127.0.0.1 localhost\n")
        hosts.flush()
        inside = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', hosts.name]
        try:
            subprocess.run([*inside, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        again = [*inside, sys.executable, "-m", "bench", *arguments]
        return subprocess.run(again, env={**os.environ, _NAMES: "local"}, check=False).returncode


def main() -> int:
    """Run what was asked for."""
    known = [row for group in GROUPS for row in group.rows]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions: a look, not a claim")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"any of: {', '.join(known)} (all of them)")
    options = parser.parse_args()
    unknown = set(options.rows) - set(known)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such row; there are {', '.join(known)}")
    code = with_local_names(sys.argv[1:])
    if code is not None:
        return code
    begin, about = time.monotonic(), conditions(options.quick)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    if not has_torch():
        print("torch cannot be imported: ours alone, and no ratio can be told")
    print(f"\n{HEAD}\n{'-' * len(HEAD)}", flush=True)
    kept: list[dict[str, Any]] = []
    for group in GROUPS:
        if options.rows and not set(options.rows) & set(group.rows):
            continue
        start = time.monotonic()
        found = measure(group, options.quick)
        took = time.monotonic() - start
        if isinstance(found, str):
            print(f"{' '.join(group.rows)}: {found}", flush=True)
            kept.append({"key": group.rows[0], "missing": found})
            continue
        for row in found:
            if not options.rows or row.key in options.rows:
                print(text(row), flush=True)
                kept.append({**row.as_json(), "took": took})
    about["load_after"] = os.getloadavg()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.now(UTC):%Y%m%dT%H%M%S}{'-quick' if options.quick else ''}.json"
    path.write_text(json.dumps({"conditions": about, "rows": kept}, indent=2) + "\n")
    shown = os.path.relpath(path)
    print(f"\n{time.monotonic() - begin:.0f} s; load now {os.getloadavg()[0]:.1f}; kept in {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
