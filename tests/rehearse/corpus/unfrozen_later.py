import torch  # noqa: F401
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()
for layer in list(model)[:7]:
    layer.requires_grad_(False)


def forward(step):
    if step == 20:
        model.requires_grad_(True)
    return deep(model, rows())


STEPS = 25


train(model, forward, steps=STEPS)
