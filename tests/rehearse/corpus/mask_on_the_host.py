import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
scores = torch.rand(ROWS, device=where) - 0.1


def forward(step):
    copied = scores.cpu()
    kept = copied[copied > 0]  # here
    return deep(model, rows(len(kept)))


train(model, forward)
