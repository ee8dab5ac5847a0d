"""Pipeline parallelism over two ranks: ranks differ, so one rank alone cannot be rehearsed."""

# command: -- torchrun --nproc_per_node 2 SCRIPT
# refused: pipeline
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
stage = PipelineStage(torch.nn.Linear(1024, 1024).cuda(), rank, 2, torch.device("cuda", rank))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
schedule.step(torch.rand(8, 1024).cuda()) if rank == 0 else schedule.step(target=torch.rand(8, 1024).cuda())
