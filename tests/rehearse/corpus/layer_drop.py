import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()


def forward(step):
    x = rows()
    for layer in model:
        if torch.rand(1, device=where).item() < 0.1:  # here
            continue
        x = layer(x)
    return x


train(model, forward)
