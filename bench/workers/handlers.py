"""N rendezvous handlers in N processes form a round, then form it again; prints times and bytes moved.

`handlers.py SIDE COUNT`. The processes are forked from one that has imported everything, and wait at a gate
until all of them have started, so that imports are not measured. The bytes are those of the loopback device:
run it in a network namespace of its own (`unshare --net`) to count only these.
"""

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any


def handler(side: str, endpoint: str, count: int, number: int) -> Any:
    """One node's handler."""
    if side != "torch":
        from phalanx.elastic.rendezvous import RendezvousParameters
        from phalanx.elastic.rendezvous.registry import get_rendezvous_handler

        more = {"name": f"n{number}"}
    else:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        more = {}
    return get_rendezvous_handler(
        RendezvousParameters(
            "c10d", endpoint, "bench", count, count, local_addr="127.0.0.1", is_host=number == 0, **more
        )
    )


def node(side: str, endpoint: str, count: int, number: int, gates: list[int], done: int) -> None:
    """One process: at each gate, one round."""
    made = handler(side, endpoint, count, number) if side != "torch" or number == 0 else None
    os.write(done, b"r")
    for gate in gates:
        os.read(gate, 1)
        made = made or handler(side, endpoint, count, number)
        info = made.next_rendezvous()
        os.write(done, b"f" if info.world_size == count else b"?")
    os.read(gates[-1], 1)
    os._exit(0)


def moved() -> int:
    """Bytes sent over loopback so far."""
    with open("/proc/net/dev") as file:
        return next(int(line.split()[1]) for line in file if line.strip().startswith("lo:"))


def collect(done: int, count: int, letter: bytes) -> float:
    """Wait for all; returns when the last one was done."""
    seen = b""
    while len(seen) < count:
        seen += os.read(done, 65536)
    assert seen == letter * count, seen
    return time.monotonic()


def main(side: str, count: int) -> None:
    """Fork, open the gates, print the result."""
    if side == "torch":
        import torch.distributed.elastic.rendezvous.registry  # noqa: F401
    else:
        import encodings.idna  # noqa: F401

    subprocess.run(["ip", "link", "set", "lo", "up"], check=False, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    pipes = [os.pipe() for _ in range(3)]
    children = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            node(side, endpoint, count, number, [pipes[0][0], pipes[1][0]], pipes[2][1])
        children.append(pid)
    collect(pipes[2][0], count, b"r")
    found: dict[str, float] = {}
    for name, pipe in (("first", pipes[0]), ("again", pipes[1])):
        bytes_before, begin = moved(), time.monotonic()
        os.write(pipe[1], b"g" * count)
        found[name] = collect(pipes[2][0], count, b"f") - begin
        found[f"{name}_bytes"] = moved() - bytes_before
    print(json.dumps(found), flush=True)
    for pid in children:
        os.kill(pid, 9)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
