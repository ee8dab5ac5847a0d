import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
lengths = torch.randint(1, 64, (64,), device=where)


def forward(step):
    return deep(model, rows(lengths.sum().item()))  # here


train(model, forward)
