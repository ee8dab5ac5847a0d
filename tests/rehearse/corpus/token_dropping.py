import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
scores = torch.rand(ROWS, device=where)


def forward(step):
    kept = (scores > 0.1).nonzero().squeeze(1)  # here
    return deep(model, rows()[kept.cuda()])


train(model, forward)
