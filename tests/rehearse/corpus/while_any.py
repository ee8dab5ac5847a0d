import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
start = torch.rand(64, device=where)


def forward(step):
    x, p, at = rows(), start, 0
    while (p < 0.9).any() and at < 16:  # here
        x, p, at = model[at % 8](x), p + 0.1, at + 1
    return x


train(model, forward)
