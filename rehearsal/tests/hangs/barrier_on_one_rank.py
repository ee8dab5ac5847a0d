import torch.distributed as dist
from setting import RANK, batch, sgd, sharded

model = sharded()
optimizer = sgd(model)
for step in range(2):
    model(batch()).sum().backward()
    optimizer.step()
    if RANK == 0:
        print(step, "done")
        dist.barrier()  # here
