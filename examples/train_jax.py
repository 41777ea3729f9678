"""Data-parallel training with JAX, one process per worker; `jax.distributed.initialize()` finds the others.

    phalanx run --nproc-per-node 2 --max-restarts 3 examples/train_jax.py --out /tmp/jax --kill-at 60

A small network learns a spiral. The model is replicated, each batch is sharded over the workers, and XLA adds
the sums between processes to the compiled step. The checkpoint holds everything that the next step depends
on, and a batch is a function of the step: a killed job continues exactly from its last checkpoint.
"""

import argparse
import json
import os
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Params = list[tuple[jax.Array, jax.Array]]


def new_params(sizes: list[int]) -> Params:
    """Weights and biases of each layer."""
    keys = jax.random.split(jax.random.key(1), len(sizes))
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=False)
    return [(jax.random.normal(key, (a, b)) / np.sqrt(a), jnp.zeros(b)) for key, a, b in pairs]


def predict(params: Params, points: jax.Array) -> jax.Array:
    """A score for the arm of the spiral on which each point lies."""
    for weights, bias in params[:-1]:
        points = jnp.tanh(points @ weights + bias)
    weights, bias = params[-1]
    return (points @ weights + bias)[:, 0]


def spiral(step: int, share: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """One worker's share of the batch of one step."""
    dice = np.random.default_rng([step, share])
    arm = dice.integers(0, 2, count)
    turn = 3 * np.sqrt(dice.random(count))
    angle = 2 * turn + np.pi * arm + dice.normal(0, 0.1, count)
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1)
    return points.astype(np.float32), arm.astype(np.float32)


def loss(params: Params, points: jax.Array, arms: jax.Array) -> jax.Array:
    """Mean cross-entropy over the batch of all workers."""
    score = predict(params, points)
    return jnp.mean(jnp.logaddexp(0, score) - arms * score)


@partial(jax.jit, donate_argnums=0)
def advance(params: Params, points: jax.Array, arms: jax.Array) -> tuple[Params, jax.Array]:
    """One step of gradient descent; XLA adds the sums between processes."""
    value, gradient = jax.value_and_grad(loss)(params, points, arms)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient), value


def save(path: str, params: Params, losses: list[float]) -> None:
    """Atomic: a kill leaves the old checkpoint or the new one, never a partial one."""
    arrays = [np.asarray(array) for pair in params for array in pair]
    with open(path + ".new", "wb") as file:
        np.savez(file, *arrays, losses=np.array(losses))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def load(path: str, params: Params) -> tuple[Params, list[float]]:
    """The last checkpoint, or the initial state. All workers must see the same directory."""
    if not os.path.exists(path):
        return params, []
    with np.load(path) as file:
        arrays = [file[f"arr_{number}"] for number in range(2 * len(params))]
        return list(zip(arrays[::2], arrays[1::2], strict=True)), file["losses"].tolist()


def train(args: argparse.Namespace) -> None:
    """Train from the last checkpoint to the last step."""
    rank, world = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated, sharded = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    path = os.path.join(args.out, "checkpoint.npz")
    params, losses = load(path, new_params([2, 32, 32, 1]))
    params = jax.device_put(params, replicated)
    kill = args.kill_at if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else -1
    if rank == 0:
        print(f"{world} processes, {jax.device_count()} devices, from step {len(losses)}", flush=True)
    while len(losses) < args.steps:
        if len(losses) == kill and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        share = spiral(len(losses), rank, args.batch)
        points, arms = (jax.make_array_from_process_local_data(sharded, part) for part in share)
        params, value = advance(params, points, arms)
        losses.append(float(value))
        if rank == 0 and (len(losses) % args.every == 0 or len(losses) == args.steps):
            save(path, params, losses)
            print(f"step {len(losses):4}  loss {losses[-1]:.4f}", flush=True)
    if rank == 0:
        with open(os.path.join(args.out, "result.json"), "w") as file:
            json.dump({"losses": losses}, file)


def main() -> None:
    """Read the arguments, connect to the others, train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, help="directory for checkpoint.npz and result.json")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="points for each worker")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument(
        "--kill-at", type=int, default=-1, help="the last rank is SIGKILLed in this step, once"
    )
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    # Otherwise JAX catches SIGTERM, and a restart waits for the grace period (30 s).
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize()
    train(args)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
