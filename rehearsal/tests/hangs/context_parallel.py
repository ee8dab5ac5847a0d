import torch
from setting import RANKS, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel

mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("cp",))
project = fully_shard(nn.Linear(64, 64).cuda().bfloat16(), mesh=mesh)
optimizer = sgd(project)
for _ in range(2):
    rows = torch.ones(1, 2, 64 * RANKS, 64, device="cuda", dtype=torch.bfloat16)
    with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[2]):
        query = project(rows)
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    optimizer.step()
