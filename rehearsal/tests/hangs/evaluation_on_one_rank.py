import torch
from setting import RANK, batch, sgd, sharded


def evaluate(model):
    model.eval()
    with torch.no_grad():
        print(model(batch()).sum())  # here
    model.train()


model = sharded()
optimizer = sgd(model)
for _ in range(2):
    model(batch()).sum().backward()
    optimizer.step()
    if RANK == 0:
        evaluate(model)
