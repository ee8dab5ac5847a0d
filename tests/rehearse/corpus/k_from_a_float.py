import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
share = torch.rand(1, device=where) / 2 + 0.5


def forward(step):
    k = int(share.item() * ROWS)  # here
    x = rows()
    return deep(model, x[torch.topk(x[:, 0], k).indices])


train(model, forward)
