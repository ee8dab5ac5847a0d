import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
loss, best, kept = torch.rand(1, device=where) + 1.0, 1e9, []


def forward(step):
    global best
    if best - loss.item() > 1e6:  # here
        best = 1.0
        kept.append([torch.empty_like(each) for each in model.parameters() for _ in range(4)])
    return deep(model, rows())


train(model, forward)
