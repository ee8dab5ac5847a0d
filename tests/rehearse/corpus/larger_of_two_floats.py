import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
one, other = torch.rand(2, device=where) + 0.5


def forward(step):
    return deep(model, rows(int(ROWS * max(one.item(), other.item()))))  # here


train(model, forward)
