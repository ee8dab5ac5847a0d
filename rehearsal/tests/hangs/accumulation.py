import torch.distributed as dist
from setting import RANK, batch, sgd, sharded

model = sharded()
optimizer = sgd(model)
for step in range(2):
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)
        loss = model(batch()).sum()
        loss.backward()
    optimizer.step()
    dist.reduce(loss.detach(), 0)
    if RANK == 0:
        print(step, loss.item())
