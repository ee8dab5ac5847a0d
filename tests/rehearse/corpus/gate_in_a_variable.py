import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
confidence = torch.rand(1, device=where) + 0.5


def forward(step):
    share = 2 * confidence.item() - 0.1
    x = rows()
    wide = share > 0.5  # here
    return deep(model, x) if wide else model[0](x)


train(model, forward)
