"""A small character-level transformer, trained with DDP, that continues exactly after a kill.

    phalanx run --nproc-per-node 2 --max-restarts 5 examples/train_ddp.py --out /tmp/ddp --kill-at 40,90 \\
        --plot /tmp/ddp/loss.png

It learns its own source text. With `--kill-at`, the last rank SIGKILLs itself in these steps; the losses and
the final weights are identical to the last bit to those of a run without kills.

Three things ensure that: the checkpoint holds everything that the next step depends on and is replaced
atomically; the batch of a step is a function of the step and the rank, not of a generator that would have to
be saved; and gradients are added in rank order. (DDP regroups its buckets after the first step of a process,
and with three or more workers another grouping is another order of addition, which changes the last bits.)

With `--keep`, every rank holds its checkpoint in memory that outlives it, and no file is written. With
`--reenter`, the ranks that were not killed also keep their processes: each builds its model once, and all go
back to the newest step that every rank has kept.
"""

import argparse
import copy
import hashlib
import io
import json
import os
import signal
import struct
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from phalanx import worker

CONTEXT = 48


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention and a two-layer network, each with a residual connection."""
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    """Predicts the next character."""

    def __init__(self, characters: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of every next character at every position."""
        return self.out(self.blocks(self.character(text) + self.place.weight[: text.shape[1]]))


class Trainer:
    """Model, optimizer and the rest of a checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.path = os.path.join(args.out, "checkpoint.pt")
        with open(__file__) as file:
            source = file.read()
        characters = sorted(set(source))
        self.text = torch.tensor([characters.index(c) for c in source])
        torch.manual_seed(1)
        self.model = Model(len(characters))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.losses: list[float] = []
        self.restarts: list[int] = []  # the steps at which training continued
        self.first = copy.deepcopy(self.state())

    def join(self) -> None:
        """Take part in a round, from the last checkpoint on."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.losses:  # of an earlier round of this process; there may be no checkpoint yet
            self.take(copy.deepcopy(self.first))
        self.load()
        self.parallel = DistributedDataParallel(self.model)
        self.parallel.register_comm_hook(None, add_in_rank_order)

    def leave(self) -> None:
        """The round is over: nothing may hold its process group."""
        self.__dict__.pop("parallel", None)

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return len(self.losses)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of this step: passages, and the same shifted by one character."""
        dice = torch.Generator().manual_seed(1_000_003 * self.step + self.rank)
        starts = torch.randint(len(self.text) - CONTEXT - 1, (self.args.batch,), generator=dice)
        passages = torch.stack([self.text[s : s + CONTEXT + 1] for s in starts.tolist()])
        return passages[:, :-1], passages[:, 1:]

    def advance(self) -> None:
        """One step of training."""
        text, following = self.batch()
        loss = functional.cross_entropy(self.parallel(text).flatten(0, 1), following.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / self.world)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "restarts": self.restarts,
        }

    def save(self) -> None:
        """Atomic: a kill leaves the old checkpoint or the new one, never a partial one."""
        state = self.state()
        if self.args.keep:
            worker.keep("training", state, step=self.step)
            return
        with open(self.path + ".new", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path + ".new", self.path)

    def load(self) -> None:
        """Load what was kept, or rank 0's checkpoint on all ranks: other machines may have none."""
        if self.args.keep:
            step = worker.agree("training")  # the same on all ranks, whichever were killed while they saved
            kept = worker.kept("training", step) if step is not None else None
            if kept is not None:
                self.take(copy.deepcopy(kept.tree))  # an optimizer takes tensors over as they are
            return
        found: list[Any] = [None]
        if self.rank == 0 and os.path.exists(self.path):
            with open(self.path, "rb") as file:
                found = [file.read()]
        dist.broadcast_object_list(found)
        if found[0] is None:
            return
        self.take(torch.load(io.BytesIO(found[0]), weights_only=True))

    def take(self, state: dict[str, Any]) -> None:
        """Continue from this state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.restarts = state["losses"], [*state["restarts"], len(state["losses"])]

    def fingerprint(self) -> str:
        """A hash of all weights."""
        digest = hashlib.sha256()
        for value in self.model.state_dict().values():
            digest.update(value.numpy().tobytes())
        return digest.hexdigest()


def add_in_rank_order(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of all gradients, added in rank order whatever bucket they are in."""
    mine = bucket.buffer()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, mine, async_op=True)
    return work.get_future().then(lambda _: torch.stack(parts).sum(0) / len(parts))


def train(trainer: Trainer) -> None:
    """Train from the last checkpoint to the last step."""
    args = trainer.args
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    kills = [int(step) for step in args.kill_at.split(",") if step]
    kill = kills[attempt] if attempt < len(kills) else -1
    if trainer.rank == 0:
        print(f"{trainer.world} workers, from step {trainer.step} to {args.steps}", flush=True)
    while trainer.step < args.steps:
        if trainer.step == kill and trainer.rank == trainer.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.advance()
        last = trainer.step == args.steps
        if last or trainer.step % args.every == 0:
            if trainer.rank == 0 or args.keep:
                trainer.save()
            if trainer.rank == 0:
                print(f"step {trainer.step:4}  loss {trainer.losses[-1]:.4f}", flush=True)
    if trainer.rank == 0:
        with open(os.path.join(args.out, "result.json"), "w") as file:
            # JSON writes floats with repr, which keeps every bit.
            json.dump({"losses": trainer.losses, "weights": trainer.fingerprint()}, file)
        if args.plot:
            with open(args.plot, "wb") as file:
                file.write(plot(trainer.losses, trainer.restarts))


def plot(losses: list[float], restarts: list[int], width: int = 720, height: int = 400) -> bytes:
    """The loss curve as a PNG, with a red line at every restart; needs no library."""
    white, grey, red, blue = b"\xff\xff\xff", b"\xcc\xcc\xcc", b"\xdd\x33\x33", b"\x22\x55\xcc"
    rows = [[white] * width for _ in range(height)]
    margin, top = 20, max(losses) or 1.0

    def across(step: float) -> int:
        return margin + round((width - 2 * margin - 1) * step / max(len(losses) - 1, 1))

    def down(loss: float) -> int:
        return height - margin - 1 - round((height - 2 * margin - 1) * loss / top)

    for loss in range(int(top) + 1):
        rows[down(loss)][margin:-margin] = [grey] * (width - 2 * margin)
    for step in restarts:
        for row in rows[margin:-margin]:
            row[across(step)] = red
    before = down(losses[0])
    for x in range(across(0), across(len(losses) - 1) + 1):
        place = (x - margin) * max(len(losses) - 1, 1) / (width - 2 * margin - 1)
        step = min(int(place), max(len(losses) - 2, 0))
        follow = losses[min(step + 1, len(losses) - 1)]
        here = down(losses[step] + (follow - losses[step]) * (place - step))
        for y in range(min(here, before), max(here, before) + 2):
            rows[y][x] = blue
        before = here

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    pixels = b"".join(b"\0" + b"".join(row) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def main() -> None:
    """Read the arguments, join the group, train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, help="directory for checkpoint.pt and result.json")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16, help="passages for each worker")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--kill-at", default="", help="steps in which the last rank is SIGKILLed: 40,90")
    parser.add_argument("--keep", action="store_true", help="checkpoints in memory, by worker.keep")
    parser.add_argument("--reenter", action="store_true", help="survivors of a kill keep their processes")
    parser.add_argument("--plot", help="write the loss curve to this PNG file")
    args = parser.parse_args()
    args.keep = args.keep or args.reenter
    os.makedirs(args.out, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    trainer = Trainer(args)  # once per process
    if args.reenter:
        worker.reenter(lambda _round: take_part(trainer))()
    else:
        take_part(trainer)


def take_part(trainer: Trainer) -> None:
    """One round: join the group, train."""
    dist.init_process_group("gloo")
    try:
        trainer.join()
        train(trainer)
        dist.barrier()
    finally:
        trainer.leave()
        if not trainer.args.reenter:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
