import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
mask = torch.rand(64, device=where) > 0.1


def forward(step):
    x = rows()
    wide = bool(mask.any())  # here
    if wide:
        x = deep(model, x)
    return model[0](x)


train(model, forward)
