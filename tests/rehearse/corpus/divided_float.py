import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
share = torch.rand(1, device=where) / 2 + 0.5


def forward(step):
    whole, _ = divmod(ROWS * share.item(), 1)
    return deep(model, rows(int(whole)))  # here


train(model, forward)
