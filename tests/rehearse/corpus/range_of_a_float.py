import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
share = torch.rand(1, device=where) / 2 + 0.5


def forward(step):
    chosen = torch.arange(ROWS * share.item(), device="cuda")  # here
    return deep(model, rows()[chosen.long()])


train(model, forward)
