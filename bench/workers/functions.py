"""One sample of `start_processes`: functions.py SIDE WHAT prints JSON.

The library is imported before the clock starts, and only by the parent: a spawned child imports this file,
too, and must import no more than the library itself makes it import.
"""

import json
import os
import sys
import tempfile
import time

PAYLOAD = 100_000_000  # bytes


def trivial(rank: int) -> int:
    """Return at once: only the launch is measured."""
    return rank


def big() -> tuple[float, bytes]:
    """A large value, and the moment when it was ready."""
    value = bytes(PAYLOAD)
    return time.monotonic(), value


_EXIT = "import os, time; time.sleep(0.3); print(repr(time.monotonic()), flush=True); os._exit({code})"
_STAY = "import time; time.sleep(1000)"


def _library(side: str) -> object:
    if side == "torch":
        import torch.distributed.elastic.multiprocessing as library
    else:
        import phalanx.elastic.multiprocessing as library  # type: ignore[no-redef]
    return library


def main(side: str, what: str) -> dict[str, float]:
    """Measure one thing once."""
    library: object = _library(side)
    with tempfile.TemporaryDirectory() as folder:
        specs = library.DefaultLogsSpecs(log_dir=folder, redirects=library.Std.ALL)  # type: ignore[attr-defined]
        begin = time.monotonic()
        if what == "trivial":
            ranks = range(8)
            args: dict[int, tuple[object, ...]] = {rank: (rank,) for rank in ranks}
            entry: object = trivial
        elif what == "big":
            args, entry = {0: ()}, big
        else:  # programs that print the time of their exit
            codes = {"success": [_EXIT.format(code=0)], "failure": [_EXIT.format(code=3), _STAY]}[what]
            args = {rank: ("-S", "-c", code) for rank, code in enumerate(codes)}
            entry = sys.executable
        envs: dict[int, dict[str, str]] = {rank: {} for rank in args}
        context = library.start_processes("bench", entry, args, envs, specs)  # type: ignore[attr-defined]
        try:
            result = context.wait()
            end = time.monotonic()
        finally:
            context.close()
        if what == "trivial":
            assert result.return_values == {rank: rank for rank in args}, result
            return {"seconds": end - begin}
        if what == "big":
            ready, value = result.return_values[0]
            return {"rate": len(value) / 1e6 / (end - ready)}
        assert result.is_failed() == (what == "failure"), result
        with open(result.stdouts[0]) as output:
            return {"seconds": end - float(output.read())}


if __name__ == "__main__":
    answer = main(sys.argv[1], sys.argv[2])
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # skips the slow exit of torch
