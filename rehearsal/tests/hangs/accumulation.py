import torch.distributed as dist
from setting import RANK, batch, sgd, sharded
from torch.distributed.device_mesh import init_device_mesh

model = sharded(mesh=init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicas", "shards")))
optimizer = sgd(model)
for accumulate in (model.set_requires_gradient_sync, model.set_requires_all_reduce):
    for last in (False, False, True):
        accumulate(last)
        loss = model(batch()[: 1 + RANK]).sum()
        loss.backward()
    optimizer.step()
    dist.reduce(loss.detach(), 0)
    if RANK == 0:
        print(loss.item())
