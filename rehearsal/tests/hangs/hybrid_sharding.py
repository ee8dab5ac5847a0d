from setting import RANK, batch, sgd, sharded
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicas", "shards"))
model = sharded(mesh=mesh)
optimizer = sgd(model)
for _ in range(2):
    for last in (False, True):
        model.set_requires_all_reduce(last)
        model(batch()[: 1 + RANK]).sum().backward()
    optimizer.step()
