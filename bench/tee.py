"""The tee: throughput, completeness and latency of a TailLog.

Throughput: four writer processes fill their log files while a tail follows them into a pipe. The clock runs
from the release of the writers to the last byte out of the pipe, and the tail is stopped when the writers
have exited, as a launcher does. Writers have their lines ready in memory, and the reader only stores what it
gets, so that mostly the tail is measured. Each line is then checked: right prefix, whole, in order, once.
Latency: one line at a time, written to a followed file, until it is readable in the pipe.
"""

from __future__ import annotations

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

from bench.measure import (
    OURS,
    THEIRS,
    Figures,
    Row,
    Target,
    compare,
    interleave,
    samplers,
    serve_samples,
    with_unit,
)

WRITERS = 4
CASES = {"1KiB lines": (1024, 200_000), "80 B lines": (80, 1_000_000)}  # line length, lines per writer
QUICK = 10  # divides the number of lines
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


def run(quick: bool) -> list[Row]:
    """Throughput, lost lines, and latency."""
    rows = []
    with samplers("bench.tee") as sample:
        for case, (length, lines) in CASES.items():
            count = lines // QUICK if quick else lines
            samples = interleave(
                lambda side, length=length, count=count: sample(side, "throughput", length, count),  # type: ignore[misc]
                1 if quick else 3,
                warm=False,
            )
            what, size = f"tee, 4 writers, {case}", f"{WRITERS * length * count / 1e6:.0f} MB"
            rows.append(compare("tee", what, "s", Target(1 / 2), samples, "seconds", [size]))
            what += ": lines missing, doubled or torn"
            rows.append(compare("tee", what, "", Target(0, "value"), samples, "lost", average=max))
        samples = interleave(lambda side: sample(side, "latency", 10 if quick else 50), 1, warm=False)
        worst = with_unit(max(samples[OURS].of("max"), default=None), "s")
        what = "line written to a followed file → in the pipe"
        rows.append(
            compare("latency", what, "s", Target(0.010, "value"), samples, "median", [f"at most {worst}"])
        )
    return rows


def _tail_class(side: str) -> Callable[..., Any]:
    if side == THEIRS:
        from torch.distributed.elastic.multiprocessing.tail_log import TailLog
    else:
        from phalanx.elastic.multiprocessing.tail_log import TailLog
    return TailLog


def _scratch() -> str:
    """A new folder, in memory if possible: the disk is not what is measured."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.mkdtemp(prefix="tee-bench-", dir=parent)


def _lost(path: str, length: int, lines: int) -> int:
    """The number of lines that are missing, doubled or torn on the console."""
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
    return WRITERS * lines - (seen - again) + again + torn


def _python(code: str, *args: object) -> subprocess.Popen[bytes]:
    """A small interpreter that has printed that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def throughput(side: str, length: int, lines: int) -> Figures:
    """One run of all writers through one tail."""
    tail_class, folder = _tail_class(side), _scratch()
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
            start = time.monotonic()
            tail = tail_class("bench", files, dst, {rank: PREFIX % rank for rank in files}).start()
            for writer in processes[:WRITERS]:
                assert writer.stdin is not None
                writer.stdin.close()
            for writer in processes[:WRITERS]:
                writer.wait()
            tail.stop()
        seconds = float(reader.stdout.readline()) - start
        reader.wait()
        return {"seconds": seconds, "lost": _lost(console, length, lines)}
    finally:
        for process in processes:
            assert process.stdout is not None
            process.kill()
            process.wait()
            process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def latency(side: str, samples: int) -> Figures:
    """Seconds from the write of a line to its arrival in the pipe, with a pause before each."""
    tail_class, folder = _tail_class(side), _scratch()
    read_end, write_end = os.pipe()
    dst = os.fdopen(write_end, "w", buffering=1)  # torch writes to the stream and never flushes it
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
    return {"median": statistics.median(times), "max": max(times)}


if __name__ == "__main__":
    KINDS = {"throughput": throughput, "latency": latency}
    serve_samples(lambda side, kind, *values: KINDS[kind](side, *values))
