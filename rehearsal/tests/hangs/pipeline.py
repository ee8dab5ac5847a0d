import torch
from setting import RANK, RANKS, sgd
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

stage = PipelineStage(nn.Linear(16, 16).cuda(), RANK, RANKS, torch.device("cuda", RANK))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = sgd(stage.submod)
rows = torch.ones(8, 16, device="cuda")
for _ in range(2):
    if RANK == 0:
        schedule.step(rows)
    else:
        schedule.step(target=rows)
    optimizer.step()
