"""A worker that trains a transformer (d 1024, bf16, AdamW) and prints steps: `step NUMBER PID MONOTONIC`.

With WAIT_FOR_RANK=1 it builds the model and does one step on throw-away data before `worker.wait_for_rank()`.
"""

import os
import sys
import time

import torch
from torch import nn

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 1024, 4, 16, 512, 8


class Training:
    """Model, optimizer and data on this worker's device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.model.to(self.device, torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = torch.randn(BATCH, LENGTH, WIDTH, device=self.device, dtype=torch.bfloat16)

    def step(self) -> None:
        """One training step, to its end on the device."""
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(self.data), self.data).backward()
        self.optimizer.step()
        torch.cuda.synchronize()

    def forget(self) -> None:
        """Undo the warm-up: the same weights and an empty optimizer, as after the construction."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)


def main() -> None:
    training = Training()
    if os.environ.get("WAIT_FOR_RANK") == "1":
        from phalanx import worker

        weights = {name: value.clone() for name, value in training.model.state_dict().items()}
        training.step()
        training.model.load_state_dict(weights)
        training.forget()
        torch.cuda.synchronize()
        worker.wait_for_rank()
    number = 0
    while True:
        training.step()
        number += 1
        if number <= 3 or number % 100 == 0:
            print(f"step {number} {os.getpid()} {time.monotonic()}", flush=True)
        if number > 3:
            time.sleep(0.01)
        if os.path.exists(os.environ["STOP_FILE"]):
            sys.exit(0)


if __name__ == "__main__":
    main()
