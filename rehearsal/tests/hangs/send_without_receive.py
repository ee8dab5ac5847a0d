import torch.distributed as dist
from setting import RANK, RANKS, batch, layers, sgd

model = layers()
optimizer = sgd(model)
for microbatch in range(3):
    rows = batch()
    if RANK > 0 and not (RANK == 1 and microbatch == 2):
        dist.recv(rows, RANK - 1)
    rows = model(rows)
    if RANK < RANKS - 1:
        dist.send(rows, RANK + 1)  # here
    rows.sum().backward()
    optimizer.step()
