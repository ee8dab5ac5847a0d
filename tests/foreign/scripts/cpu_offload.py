"""FSDP2 with parameters and optimizer on the host: the card holds one layer at a time."""

# command: -- torchrun --nproc_per_node 4 SCRIPT
# bytes: 2 * 16.8e6 * 4
# at most: 2.5
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(torch.distributed.get_rank())
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(24)])
for layer in model:
    fully_shard(layer, offload_policy=CPUOffloadPolicy())
fully_shard(model, offload_policy=CPUOffloadPolicy())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.rand(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
