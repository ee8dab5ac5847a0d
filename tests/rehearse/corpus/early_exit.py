import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
confidence = torch.rand(8, device=where) / 2


def forward(step):
    x = rows()
    for at, layer in enumerate(model):
        x = layer(x)
        if confidence[at] > 0.9:  # here
            return x
    return x


train(model, forward)
