import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
share = torch.rand(1, device=where) / 2 + 0.5


def forward(step):
    return deep(model, rows(round(share.item() * ROWS)))  # here


train(model, forward)
