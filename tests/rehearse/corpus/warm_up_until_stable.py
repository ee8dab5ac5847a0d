import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
history = torch.rand(8, device=where)


def forward(step):
    x = rows()
    stable = history.std().item() < 0.9  # here
    if stable:
        x = deep(model, x)
    return model[0](x)


train(model, forward)
