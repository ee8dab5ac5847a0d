from setting import RANK, batch, layers, sgd
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(layers())
optimizer = sgd(model)
with Join([model]):
    for _ in range(2 + RANK % 2):
        model(batch()).sum().backward()
        optimizer.step()
