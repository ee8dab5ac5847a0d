import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
gate = torch.tensor(0.0).to(where)


def forward(step):
    x = rows()
    if torch.sigmoid(gate).item() > 0.4:  # here
        x = deep(model, x)
    return model[0](x)


train(model, forward)
