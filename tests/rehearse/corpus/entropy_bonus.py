import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
probabilities = torch.rand(64, device=where).softmax(0)


def forward(step):
    x = rows()
    entropy = -(probabilities * probabilities.log()).sum()
    if entropy.item() >= 1.0:  # here
        x = deep(model, x)
    return model[0](x)


train(model, forward)
