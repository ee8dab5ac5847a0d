import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
load = torch.rand(8, device=where) + 0.1


def forward(step):
    x = rows()
    for layer in [each for at, each in enumerate(model) if load[at].item() > 0.05]:  # here
        x = layer(x)
    return model[0](x)


train(model, forward)
