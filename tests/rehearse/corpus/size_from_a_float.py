import math

import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
share = torch.rand(100, device=where).mean()


def forward(step):
    return deep(model, rows(math.ceil(ROWS * share.item())))  # here


train(model, forward)
