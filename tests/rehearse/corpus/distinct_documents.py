import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
found = torch.randint(0, 2048, (ROWS,)).to(where)
found = found + torch.randint(0, 2, (ROWS,), device=where)


def forward(step):
    documents = torch.unique(found)  # here
    return deep(model, rows(len(documents)))


train(model, forward)
