import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
draft = torch.randint(0, 2, (64,), device=where)
target = torch.randint(0, 2, (64,), device=where)


def forward(step):
    accepted = (draft.float() == target.float()).sum().item()  # here
    return deep(model, rows(64 * accepted + 64))


train(model, forward)
