import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
scores = torch.arange(4.0).to(where)
widths = [256, 1024, 2048, 4096]


def forward(step):
    chosen = widths[scores.argmax().item()]  # here
    return deep(model, rows(chosen))


train(model, forward)
