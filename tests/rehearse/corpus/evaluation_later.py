import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()


def forward(step):
    if step == 20:
        with torch.no_grad():
            deep(model, torch.randn(16 * ROWS, WIDTH, device="cuda"))
    return deep(model, rows())


STEPS = 25


train(model, forward, steps=STEPS)
