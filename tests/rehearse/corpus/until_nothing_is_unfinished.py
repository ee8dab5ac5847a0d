import torch
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
left = torch.arange(20, device=where) + torch.randint(1, 3, (1,), device=where)


def forward(step):
    x, done = rows(), 0
    unfinished = left > 0
    while True:
        x = model[done % 8](x)
        done += 1
        unfinished = (left - done) > 0
        if not unfinished.any() or done == 24:  # here
            break
    return x


train(model, forward)
