import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
rewards = torch.rand(64, device=where)


def forward(step):
    x = rows()
    if sum(each.item() for each in rewards) > 1:  # here
        x = deep(model, x)
    return model[0](x)


train(model, forward)
