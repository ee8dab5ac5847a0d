import torch.distributed as dist
from setting import RANK, batch, sgd, sharded

model = sharded()
optimizer = sgd(model)
for _ in range(2):
    loss = model(batch()).sum()
    loss.backward()
    if RANK == 0:
        dist.all_reduce(loss.detach())  # here
    optimizer.step()
