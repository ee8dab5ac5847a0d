import torch
from setting import batch, layers, sgd
from torch.nn.parallel import DistributedDataParallel

replicated = DistributedDataParallel(layers())
model = torch.compile(replicated)
optimizer = sgd(model)
for _ in range(2):
    with replicated.no_sync():
        model(batch()).sum().backward()
    model(batch()).sum().backward()
    optimizer.step()
