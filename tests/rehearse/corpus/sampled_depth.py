import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()


def forward(step):
    depth = 1 + int(torch.rand((), device=where).item() * 8)  # here
    return deep(model[:depth], rows())


torch.manual_seed(3)


train(model, forward)
