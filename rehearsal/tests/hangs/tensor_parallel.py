from setting import batch, layers, sgd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
model = parallelize_module(layers(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = sgd(model)
for _ in range(2):
    model(batch()).sum().backward()
    optimizer.step()
