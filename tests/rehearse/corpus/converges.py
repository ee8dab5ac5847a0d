import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
error = torch.rand(1, device=where) + 1.0


def forward(step):
    x, e, at = rows(), error, 0
    while e > 0.01 and at < 16:  # here
        x, e, at = model[at % 8](x), e / 2, at + 1
    return x


train(model, forward)
