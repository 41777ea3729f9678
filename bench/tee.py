"""Measures the tee: throughput, completeness and latency, side by side with torch's TailLog when it is there.

    python bench/tee.py [--quick]

Throughput: four writer processes fill their log files while a tail follows them into a pipe. The clock runs
from the release of the writers to the last byte out of the pipe, and the tail is stopped when the writers
have exited, as a launcher does. Writers have their lines ready in memory, and the reader only stores what it
gets, so that mostly the tail is measured. Each line is then checked: right prefix, whole, in order, once.
Latency: one line at a time, written to a followed file, until it is readable in the pipe.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

WRITERS = 4
CASES = {"1KiB lines": (1024, 200_000), "80 B lines": (80, 1_000_000)}  # line length, lines per writer
QUICK = 10  # the divisor of the number of lines
PREFIX = "[bench%d]:"

_WRITER = """
import os, sys
rank, length, lines, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
pad = b"x" * (length - 13) + b"\\n"
data = memoryview(b"".join([b"%02d:%08d:" % (rank, i) + pad for i in range(lines)]))
out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
print("ready", flush=True)
sys.stdin.readline()
for at in range(0, len(data), 8192):
    os.write(out, data[at : at + 8192])
os._exit(0)
"""

_READER = """
import os, sys, time
room = bytearray(b"-") * int(sys.argv[1])
view, at = memoryview(room), 0
print("ready", flush=True)
while at < len(room):
    n = os.readv(0, [view[at : at + 1048576]])
    if not n:
        break
    at += n
print(time.monotonic(), flush=True)
with open(sys.argv[2], "wb") as kept:
    kept.write(view[:at])
"""


def _tails() -> dict[str, Callable[..., Any]]:
    """The TailLog classes to compare: ours, and torch's where it can be imported."""
    found = {"phalanx": importlib.import_module("phalanx.logs.tail_log").TailLog}
    try:
        module = importlib.import_module("torch.distributed.elastic.multiprocessing.tail_log")
    except ImportError:
        return found
    return {**found, "torch": module.TailLog}


def _scratch() -> str:
    """A new folder, in memory where that is possible: the disk is not what is measured."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.mkdtemp(prefix="tee-bench-", dir=parent)


def _check(path: str, length: int, lines: int) -> dict[str, int]:
    """Counts the lines that are missing, doubled or torn in what the console got."""
    expected = [0] * WRITERS
    seen = torn = again = 0
    pad = b"x" * (length - 13) + b"\n"
    heads = {(PREFIX % rank + f"{rank:02d}:").encode(): rank for rank in range(WRITERS)}
    head_length = len(next(iter(heads)))
    with open(path, "rb", buffering=1 << 20) as console:
        for line in console:
            rank = heads.get(line[:head_length], -1)
            number = line[head_length : head_length + 8]
            if rank < 0 or not number.isdigit() or line[head_length + 9 :] != pad:
                torn += 1
                continue
            seen += 1
            if int(number) < expected[rank]:
                again += 1
            expected[rank] = int(number) + 1
    return {"missing": WRITERS * lines - (seen - again), "doubled": again, "torn": torn}


def _python(code: str, *args: object) -> subprocess.Popen[bytes]:
    """A small interpreter that has said it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def throughput(tail_class: Callable[..., Any], length: int, lines: int) -> dict[str, float]:
    """One run of all writers through one tail."""
    folder = _scratch()
    processes = []
    try:
        files = {rank: os.path.join(folder, str(rank)) for rank in range(WRITERS)}
        console = os.path.join(folder, "console")
        processes = [_python(_WRITER, rank, length, lines, path) for rank, path in files.items()]
        room = WRITERS * lines * (length + 2 * len(PREFIX))
        reader = _python(_READER, room, console)
        processes.append(reader)
        assert reader.stdin is not None
        assert reader.stdout is not None
        with os.fdopen(os.dup(reader.stdin.fileno()), "w") as dst:
            reader.stdin.close()
            cpu, start = time.process_time(), time.monotonic()
            tail = tail_class("bench", files, dst, {rank: PREFIX % rank for rank in files}).start()
            for writer in processes[:WRITERS]:
                assert writer.stdin is not None
                writer.stdin.close()
            for writer in processes[:WRITERS]:
                writer.wait()
            written = time.monotonic() - start
            tail.stop()
        result = {"seconds": float(reader.stdout.readline()) - start, "written": written}
        result["cpu"] = time.process_time() - cpu
        reader.wait()
        return {**result, **_check(console, length, lines)}
    finally:
        for process in processes:
            assert process.stdout is not None
            process.kill()
            process.wait()
            process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def latency(tail_class: Callable[..., Any], samples: int) -> list[float]:
    """Seconds from the write of a line to its arrival in the pipe, with a pause before each."""
    folder = _scratch()
    read_end, write_end = os.pipe()
    dst = os.fdopen(write_end, "w", buffering=1)  # torch's writes through the stream and never flushes it
    times = []
    try:
        path = os.path.join(folder, "log")
        with open(path, "wb", buffering=0) as log:
            tail = tail_class("bench", {0: path}, dst).start()
            try:
                for number in range(samples):
                    time.sleep(0.02 + 0.007 * (number % 7))  # unrelated to any polling rate
                    start = time.perf_counter()
                    log.write(b"line %d\n" % number)
                    got = b""
                    while not got.endswith(b"\n"):
                        if not select.select([read_end], [], [], 10)[0]:
                            raise RuntimeError(f"line {number} did not arrive within 10 s")
                        got += os.read(read_end, 65536)
                    times.append(time.perf_counter() - start)
            finally:
                tail.stop()
    finally:
        dst.close()
        os.close(read_end)
        shutil.rmtree(folder, ignore_errors=True)
    return times


def run(quick: bool) -> dict[str, Any]:
    """All measurements, ours and torch's in turn; times are medians in seconds."""
    tails = _tails()
    rounds = 1 if quick else 3
    report: dict[str, Any] = {"torch": "torch" in tails, "throughput": {}, "latency": {}}
    for case, (length, lines) in CASES.items():
        count = lines // QUICK if quick else lines
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in tails}
        for turn in range(rounds):
            for name in list(tails) if turn % 2 == 0 else list(tails)[::-1]:
                runs[name].append(throughput(tails[name], length, count))
        row: dict[str, Any] = {
            name: {
                **{key: statistics.median(r[key] for r in results) for key in ("seconds", "written", "cpu")},
                **{key: max(r[key] for r in results) for key in ("missing", "doubled", "torn")},
            }
            for name, results in runs.items()
        }
        row["megabytes"] = WRITERS * length * count / 1e6
        if "torch" in tails:
            row["ratio"] = row["phalanx"]["seconds"] / row["torch"]["seconds"]
        report["throughput"][case] = row
    for name, tail_class in tails.items():
        times = sorted(latency(tail_class, 10 if quick else 50))
        report["latency"][name] = {"median": statistics.median(times), "max": times[-1]}
    if "torch" in tails:
        report["latency"]["ratio"] = (
            report["latency"]["phalanx"]["median"] / report["latency"]["torch"]["median"]
        )
    return report


def main() -> None:
    """Prints the table, then the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the lines, one round")
    report = run(parser.parse_args().quick)
    print(f"{'tee of 4 writers':<18}{'':<10}{'seconds':>9}{'MB/s':>8}{'missing':>9}{'doubled':>9}{'torn':>7}")
    for case, row in report["throughput"].items():
        for name in ("phalanx", "torch"):
            if name in row:
                r = row[name]
                speed = row["megabytes"] / r["seconds"]
                print(
                    f"{case:<18}{name:<10}{r['seconds']:>9.2f}{speed:>8.0f}"
                    f"{r['missing']:>9.0f}{r['doubled']:>9.0f}{r['torn']:>7.0f}"
                )
        if "ratio" in row:
            print(f"{'':<18}{'ratio':<10}{row['ratio']:>9.2f}")
    for name in ("phalanx", "torch"):
        if name in report["latency"]:
            times = report["latency"][name]
            median, worst = times["median"] * 1e3, times["max"] * 1e3
            print(f"{'line -> console':<18}{name:<10}{median:>7.2f}ms  max {worst:.2f}ms")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
