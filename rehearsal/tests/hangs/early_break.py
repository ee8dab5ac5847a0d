import torch.distributed as dist
from setting import RANK, batch, sgd, sharded

model = sharded()
optimizer = sgd(model)
for step in range(4):
    loss = model(batch()).sum()  # here
    loss.backward()
    optimizer.step()
    if RANK == 2 and step == 1:
        break
dist.barrier()
