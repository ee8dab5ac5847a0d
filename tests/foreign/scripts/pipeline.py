"""Pipeline parallelism over two ranks, which are rehearsed together"""

# command: -- torchrun --nproc_per_node 2 SCRIPT
# bytes: 2 * 8192**2 * 4
# at most: 1.75
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
stage = PipelineStage(torch.nn.Linear(8192, 8192).cuda(rank), rank, 2, torch.device("cuda", rank))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
rows = torch.rand(8, 8192).cuda(rank)
schedule.step(rows) if rank == 0 else schedule.step(target=rows)
