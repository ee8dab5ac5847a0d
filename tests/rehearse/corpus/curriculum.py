import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
loss = torch.rand(1, device=where) + 2.0
length = 1024


def forward(step):
    global length
    if loss.item() > 1.0:  # here
        length = ROWS
    return deep(model, rows(length))


train(model, forward)
