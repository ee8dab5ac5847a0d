import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
confidence = torch.rand(1, device=where) + 0.5


def forward(step):
    return deep(model, rows()) if confidence.item() > 0.4 else model[0](rows())  # here


train(model, forward)
