"""Imports torch and ten packages that leave a thread each (bench/warm.py makes them), and stamps that."""

import os
import signal
import sys
import time

import bench_threads0  # type: ignore[import-not-found]  # noqa: F401
import bench_threads1  # type: ignore[import-not-found]  # noqa: F401
import bench_threads2  # type: ignore[import-not-found]  # noqa: F401
import bench_threads3  # type: ignore[import-not-found]  # noqa: F401
import bench_threads4  # type: ignore[import-not-found]  # noqa: F401
import bench_threads5  # type: ignore[import-not-found]  # noqa: F401
import bench_threads6  # type: ignore[import-not-found]  # noqa: F401
import bench_threads7  # type: ignore[import-not-found]  # noqa: F401
import bench_threads8  # type: ignore[import-not-found]  # noqa: F401
import bench_threads9  # type: ignore[import-not-found]  # noqa: F401
import torch  # noqa: F401

at = time.monotonic()
line = f"imported {os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()} {at!r}\n"
events = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY)
os.write(events, line.encode())
while "stay" in sys.argv:
    signal.pause()
