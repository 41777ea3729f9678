"""A worker that trains on the GPU and prints the time of completed steps: `step NUMBER PID MONOTONIC`."""

import os
import sys
import time

import torch


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(256, 1024, device=device)
    number = 0
    while True:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), data)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        number += 1
        if number <= 3 or number % 100 == 0:
            print(f"step {number} {os.getpid()} {time.monotonic()}", flush=True)
        if number > 3:
            time.sleep(0.01)
        if os.path.exists(os.environ["STOP_FILE"]):
            sys.exit(0)


if __name__ == "__main__":
    main()
