"""Elastic training without a framework: sockets in a ring, a checkpoint, any number of workers.

    phalanx run --nproc-per-node 4 --max-restarts 3 examples/elastic_cpu.py --checkpoint /tmp/line.json

Fits a line to points by gradient descent. Every worker has a share of the points; in each step the workers
add up their gradients around a ring. They add integers (fixed point), so the order does not matter: the
result is identical to the last bit however often the job was interrupted, and with any number of workers.

It survives a kill because its checkpoint is replaced atomically and it starts from the last one. Phalanx does
the rest: it stops, regroups and restarts the workers.
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time

from phalanx.elastic.utils.distributed import create_c10d_store

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
ONE = 1 << 20  # 1.0 in fixed point


class Ring:
    """Every worker sends to the next one and receives from the previous one."""

    def __init__(self) -> None:
        if WORLD == 1:
            return
        # The store of this round, empty at its start: workers publish their addresses in it.
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = create_c10d_store(False, host, port, wait_for_workers=False)
        with socket.create_server(("", 0)) as server, store:
            with socket.create_connection((host, port)) as link:  # this worker's address for the others
                mine = [link.getsockname()[0], server.getsockname()[1]]
            store.set(f"ring/{RANK}", json.dumps(mine))
            there = json.loads(store.get(f"ring/{(RANK + 1) % WORLD}"))
            self.next = socket.create_connection(tuple(there)).makefile("w")
            self.before = server.accept()[0].makefile("r")

    def send(self, numbers: list[int]) -> None:
        """Send to the next worker."""
        self.next.write(json.dumps(numbers) + "\n")
        self.next.flush()

    def receive(self) -> list[int]:
        """Receive from the previous worker."""
        line = self.before.readline()
        if not line:
            raise ConnectionError(f"rank {(RANK - 1) % WORLD} closed the connection")
        return json.loads(line)

    def sum(self, numbers: list[int]) -> list[int]:
        """The sums over all workers: once around the ring to add, once around to distribute."""
        if WORLD == 1:
            return numbers
        if RANK == 0:
            self.send(numbers)
            total = self.receive()
            self.send(total)
            self.receive()
            return total
        self.send([a + b for a, b in zip(self.receive(), numbers, strict=True)])
        total = self.receive()
        self.send(total)
        return total


def points(count: int) -> list[tuple[int, int]]:
    """The same points for all workers; each takes its share."""
    dice = random.Random(7)
    xs = [dice.randrange(-ONE, ONE) for _ in range(count)]
    return [(x, 3 * x // 2 - ONE // 4 + dice.randrange(-ONE // 8, ONE // 8)) for x in xs]


def save(path: str, state: dict[str, int]) -> None:
    """Atomic: a kill leaves the old checkpoint or the new one, never a partial one."""
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path) or ".", delete=False) as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def load(path: str) -> dict[str, int]:
    """The last checkpoint, or the initial state."""
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return {"step": 0, "slope": 0, "offset": 0}


def fail_on_purpose(args: argparse.Namespace, step: int) -> None:
    """For demonstrations: the last worker fails in a given step of the first attempt."""
    if ATTEMPT or RANK != WORLD - 1:
        return
    if step == args.crash_at:
        raise ValueError(f"record {step} of shard {RANK} is corrupt")
    if step == args.kill_at:
        print(f"rank {RANK} is killed on purpose (SIGKILL) in step {step}", flush=True)
        with open(args.checkpoint + ".killed", "w") as file:
            file.write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def print_start(args: argparse.Namespace, state: dict[str, int]) -> None:
    """Print the number of workers and the first step."""
    if RANK != 0:
        return
    workers = f"{WORLD} worker{'s' * (WORLD > 1)}"
    if state["step"] == 0:
        print(f"{workers}, {args.steps} steps")
        return
    ago = ""
    try:
        with open(args.checkpoint + ".killed") as file:
            ago = f" {1000 * (time.time() - float(file.read())):.0f} ms after the kill"
        os.remove(args.checkpoint + ".killed")
    except FileNotFoundError:
        pass
    print(f"{workers} again{ago}, at step {state['step']} of {args.steps}")


def train(args: argparse.Namespace) -> None:
    """Gradient descent from the last checkpoint to the last step."""
    share = points(args.points)[RANK::WORLD]
    ring = Ring()
    # Rank 0's checkpoint counts: other machines may have none.
    start = load(args.checkpoint) if RANK == 0 else {"step": 0, "slope": 0, "offset": 0}
    step, slope, offset = ring.sum(list(start.values()))
    print_start(args, {"step": step})
    while step < args.steps:
        fail_on_purpose(args, step)
        errors = [(x, slope * x // ONE + offset - y) for x, y in share]
        total = ring.sum(
            [
                sum(e * x // ONE for x, e in errors),
                sum(e for _, e in errors),
                sum(e * e // ONE for _, e in errors),
            ]
        )
        slope -= total[0] // args.points // 10
        offset -= total[1] // args.points // 10
        step += 1
        if RANK == 0 and (step % args.every == 0 or step == args.steps):
            save(args.checkpoint, {"step": step, "slope": slope, "offset": offset})
            print(f"step {step:4}  loss {total[2] / args.points / ONE:.6f}")
    if RANK == 0:
        print(f"y = {slope / ONE:.6f} x {offset / ONE:+.6f}")


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", required=True, help="file in which rank 0 keeps the state")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--points", type=int, default=4000)
    parser.add_argument(
        "--kill-at", type=int, default=-1, help="the last rank is SIGKILLed in this step, once"
    )
    parser.add_argument("--crash-at", type=int, default=-1, help="the last rank raises in this step, once")
    args = parser.parse_args()
    try:
        train(args)
    except ConnectionError as error:
        # A neighbour has failed. Its failure is the root cause; the agent is about to stop this worker.
        signal.sigtimedwait([], 10)
        sys.exit(f"rank {RANK}: {error}")


if __name__ == "__main__":
    main()
