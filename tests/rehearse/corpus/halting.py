import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
halting = torch.rand(64, device=where) / 10


def forward(step):
    x, total = rows(), torch.zeros(64, device=where)
    for layer in model:
        x, total = layer(x), total + halting
        if (total > 0.99).all():  # here
            break
    return x


train(model, forward)
