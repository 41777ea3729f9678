"""A script that shows something before its heavy imports: stamps its first line, parses, and then imports."""

import time

FIRST = time.monotonic()  # the first line of user code

import argparse  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402


def stamp(what: str, at: float) -> None:
    """Send an event; the line is short enough to be atomic in a pipe."""
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    line = f"{what} {rank} {attempt} {os.getpid()} {at!r}\n"
    events = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY)
    os.write(events, line.encode())
    os.close(events)


stamp("up", FIRST)
parser = argparse.ArgumentParser()
parser.add_argument("--stay", action="store_true", help="wait for a signal at the end")
options = parser.parse_args()

import torch  # noqa: E402, F401

stamp("imported", time.monotonic())
while options.stay:
    signal.pause()
