import torch
import torch.distributed as dist
from setting import RANK, RANKS, batch, sgd, sharded

model = sharded()
optimizer = sgd(model)
model(batch()).sum().backward()
optimizer.step()
scores = torch.ones(4 + RANK % 2, device="cuda")  # a last batch that is smaller on some ranks
everyone = [torch.empty_like(scores) for _ in range(RANKS)]
dist.all_gather(everyone, scores)  # here
