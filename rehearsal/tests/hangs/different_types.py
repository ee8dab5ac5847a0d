import torch.distributed as dist
from setting import RANK, batch, sgd, sharded

model = sharded()
optimizer = sgd(model)
loss = model(batch()).sum()
loss.backward()
optimizer.step()
total = loss.detach().double() if RANK == 0 else loss.detach()
dist.all_reduce(total)  # here
