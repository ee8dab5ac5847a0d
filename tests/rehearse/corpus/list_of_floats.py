import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
shares = torch.rand(4, device=where) + 0.5


def forward(step):
    x = rows()
    for share in shares.tolist():
        if share > 0.2:  # here
            x = deep(model, x)
    return model[0](x)


train(model, forward)
