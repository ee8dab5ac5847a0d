"""What the scripts of the corpus share.

Every script computes some values on which its memory depends. With KNOWN=1, the host computes them, so a rehearsal
predicts the exact peak. Otherwise, the GPU computes them, and a rehearsal must not predict less without a warning.
"""

import os
from collections.abc import Callable

import torch
from torch import nn

where = "cpu" if os.environ.get("KNOWN") else "cuda"
WIDTH, ROWS = 1024, 4096
torch.manual_seed(0)


def layers(count: int = 8) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count)).cuda()


def rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, WIDTH, device="cuda", requires_grad=True)


def deep(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = layer(x)
    return x


def train(model: nn.Module, forward: Callable[[int], torch.Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        forward(step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
