import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
energy = torch.rand(1024, device=where).sort(descending=True).values


def forward(step):
    rank = int((energy.cumsum(0) / energy.sum() < 0.9).sum())  # here
    x = rows()
    return model[0](x) + (x @ torch.randn(WIDTH, rank * 8, device="cuda")).sum(1, keepdim=True)


train(model, forward)
