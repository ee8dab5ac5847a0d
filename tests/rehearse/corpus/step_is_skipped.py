import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
norm = torch.rand(1, device=where) + 0.5
cache = []


def forward(step):
    x = deep(model, rows())
    if norm.item() < 0.1:  # here
        return x
    cache.append(x.detach())
    return x


train(model, forward)
