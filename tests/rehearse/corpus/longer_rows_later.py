import torch  # noqa: F401
from common import ROWS, WIDTH, deep, layers, rows, train, where  # noqa: F401

model = layers()


def forward(step):
    return deep(model, rows(ROWS if step < 20 else 4 * ROWS))


STEPS = 25


train(model, forward, steps=STEPS)
