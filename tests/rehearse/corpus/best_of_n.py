import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
rewards = torch.rand(8, device=where)


def forward(step):
    good = [at for at, reward in enumerate(rewards.tolist()) if reward >= 0.1]  # here
    return deep(model, rows(512 * max(len(good), 1)))


train(model, forward)
