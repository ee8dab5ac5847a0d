import torch
from setting import batch, layers, sgd
from torch.nn.parallel import DistributedDataParallel

model = torch.compile(DistributedDataParallel(layers()))
optimizer = sgd(model)
for _ in range(2):
    model(batch()).sum().backward()
    optimizer.step()
