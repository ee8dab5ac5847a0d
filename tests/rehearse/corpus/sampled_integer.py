import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()


def forward(step):
    return deep(model[: torch.randint(4, 9, (), device=where).item()], rows())  # here


train(model, forward)
