import torch.distributed as dist
from setting import RANK, batch, sgd, sharded
from torch.distributed.device_mesh import init_device_mesh

model = sharded()
optimizer = sgd(model)
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("rows", "columns"))
rows, columns = mesh.get_all_groups()
model(batch()).sum().backward()
optimizer.step()
loss = batch()
groups = [rows, columns] if RANK in (0, 3) else [columns, rows]
for group in groups:
    dist.all_reduce(loss, group=group)  # here
