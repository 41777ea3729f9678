"""A warm-up for standby workers: open the device, and load the libraries and kernels of a first step."""

import torch


def warm() -> None:
    """One training step of the shape the script uses, on throw-away data."""
    device = torch.device("cuda", 0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(256, 1024, device=device)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(data), data).backward()
    optimizer.step()
    torch.cuda.synchronize()
