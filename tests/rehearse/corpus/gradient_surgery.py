import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where

model = layers()
one, other = (torch.rand(64, device=where) - 1 for _ in range(2))


def forward(step):
    x = rows()
    if (one * other).sum() > 0:  # here
        x = x + torch.randn(8, ROWS, WIDTH, device="cuda").sum(0)
    return deep(model, x)


train(model, forward)
