from setting import batch, layers, sgd
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(layers())
optimizer = sgd(model)
for _ in range(2):
    with model.no_sync():
        model(batch()).sum().backward()
    model(batch()).sum().backward()
    optimizer.step()
