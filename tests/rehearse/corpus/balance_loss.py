import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
counts = torch.rand(8, device=where)


def forward(step):
    x = rows()
    if counts.max() > 2 * counts.min():  # here
        x = deep(model, x)
    return model[0](x)


train(model, forward)
