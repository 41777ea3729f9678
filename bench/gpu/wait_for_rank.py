"""SIGKILL of a transformer's worker → its first completed step again, with and without wait_for_rank.

    python bench/gpu/wait_for_rank.py [--runs 5] [--modes torchrun,off,standby,warmup,wait] [--out FILE]

    standby  --warm standby
    warmup   --warm standby with a generic warm-up (warm_device.py)
    wait     --warm standby, and the script calls worker.wait_for_rank() after a first step on throw-away data

One worker on one GPU, the modes alternate; bench/gpu/restart.py has the method. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import restart  # noqa: E402 - beside this file

RUN = [sys.executable, "-m", "phalanx", "run", "--warm"]
restart.MODES.update(
    standby=[*RUN, "standby"],
    warmup=[*RUN, "standby", "--warmup", "warm_device:warm"],
    wait=[*RUN, "standby"],
)


def measure(mode: str, settle: float) -> dict[str, float]:
    """One run of bench/gpu/restart.py with the transformer."""
    os.environ["WAIT_FOR_RANK"] = "1" if mode == "wait" else "0"
    return restart.measure(mode, settle, "transformer.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--settle", type=float, default=25.0)
    parser.add_argument("--modes", default="torchrun,off,standby,warmup,wait")
    parser.add_argument("--out")
    options = parser.parse_args()
    modes = options.modes.split(",")
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for mode in modes:  # once unmeasured: page cache, byte code, and the cache of imports
        measure(mode, 15.0)
    for _ in range(options.runs):
        for mode in modes:
            found[mode].append(measure(mode, options.settle))
            print(mode, json.dumps(found[mode][-1]), flush=True)
    medians = {
        mode: {what: round(statistics.median(run[what] for run in runs), 3) for what in ("launch", "restart")}
        for mode, runs in found.items()
    }
    restart.publish(found, options.out, median_s=medians)


if __name__ == "__main__":
    main()
