"""A pipeline of four stages: rehearse -- torchrun --nproc_per_node 4 examples/pipeline.py"""

import os

import torch
from torch import nn
from torch.distributed import init_process_group, pipelining

rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
init_process_group("nccl")
layers = [nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True, device=device) for _ in range(4)]
model = nn.Sequential(*layers)
stage = pipelining.PipelineStage(model, rank, stages, device)
schedule = pipelining.Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(16, 1024, 4096, device=device)
for _ in range(3):
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch)
    optimizer.step()
    optimizer.zero_grad()
