import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
buffer = []


def forward(step):
    buffer.append(torch.randn(ROWS, WIDTH, device="cuda"))
    return deep(model, rows())


STEPS = 25


train(model, forward, steps=STEPS)
