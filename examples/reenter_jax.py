"""JAX in every worker, compiled once per process: survivors of a kill do not compile again.

    phalanx run --nproc-per-node 2 --max-restarts 3 examples/reenter_jax.py --kill-at 30

Each process runs JAX by itself, and the gradients are added through the round's store, in rank order. (JAX's
own distributed runtime ends a process that has lost a peer: nothing of it could be kept.) All ranks go back
to the newest step that all of them have kept; the result is identical with and without the kill.
"""

import argparse
import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import worker
from phalanx.store.tcpstore.client import TorchStoreClient

compiled = 0  # how often the step was traced in this process


@jax.jit
def gradient(weights: jax.Array, points: jax.Array) -> jax.Array:
    """Of the mean squared distance to a line."""
    global compiled
    compiled += 1  # executed while it is traced only

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.mean((points @ weights - jnp.sin(points[:, 0])) ** 2)

    return jax.grad(loss)(weights)


def main(round: Any, steps: int, kill_at: int) -> None:
    """Gradient descent from the newest common step."""
    last = worker.agree("weights")
    kept = None if last is None else worker.kept("weights", last)
    weights = np.zeros(3, np.float32) if kept is None else np.array(kept.tree)
    with TorchStoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 60.0) as store:
        for step in range(0 if last is None else last + 1, steps):
            if (round.number, round.rank, step) == (1, 1, kill_at):
                os.kill(os.getpid(), signal.SIGKILL)
            points = np.random.default_rng([step, round.rank]).normal(size=(64, 3)).astype(np.float32)
            mine = np.asarray(gradient(jnp.asarray(weights), jnp.asarray(points)))
            store.set(f"{step}/{round.rank}", mine.tobytes())
            names = [f"{step}/{rank}" for rank in range(round.world_size)]
            store.wait(names, 60.0)
            parts = [np.frombuffer(part, np.float32) for part in store.multi_get(names)]
            weights = weights - np.float32(0.1) * (sum(parts) / np.float32(len(parts)))
            worker.keep("weights", weights, step=step)
    print(f"rank {round.rank}: compiled {compiled} times, weights {weights.tobytes().hex()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-at", type=int, default=-1, help="the step in which rank 1 is SIGKILLed")
    args = parser.parse_args()
    worker.reenter(main)(args.steps, args.kill_at)
