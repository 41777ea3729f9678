"""Writes the cost of each call of `phalanx.worker`, in seconds, to a file: calls.py FILE COUNT ROUNDS."""

import json
import sys
import time

from phalanx import worker

path, count, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def nothing(step: int) -> None: ...


def expires(step: int) -> None:
    with worker.expires(60):
        pass


def section(step: int) -> None:
    with worker.section("step"):
        pass


def cost(call: object) -> float:
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for step in range(count):
            call(step)  # type: ignore[operator]
        best = min(best, time.perf_counter() - begin)
    return best / count


assert worker.supervised(), "the calls must have an effect"
base = cost(nothing)
calls = {
    "heartbeat": worker.heartbeat,
    "should_checkpoint": lambda _step: worker.should_checkpoint(),
    "section": section,
    "expires": expires,
}
with open(path, "w") as file:
    json.dump({name: max(0.0, cost(call) - base) for name, call in calls.items()}, file)
