import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
confidence = torch.rand(1, device=where) + 0.5


def forward(step):
    x = rows()
    if float(confidence) > 0.4:  # here
        x = deep(model, x)
    return model[0](x)


train(model, forward)
