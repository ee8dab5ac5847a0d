"""A plain PyTorch + FSDP2 loop that survives running out of memory. No torchtune, no GPU:

torchrun --nproc_per_node 2 examples/plain_fsdp2.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtune_adaptive import MemoryMeter, RowLimit, SampleKind, StepRunner, Totals

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
blocks = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)]
model = nn.Sequential(nn.Embedding(128, 128), *blocks, nn.Linear(128, 128))
for module in [*model, model]:
    fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def forward_backward(samples):
    """One microbatch. Returns the sum of its losses and its target tokens; `run` adds them up over all ranks."""
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    logits, labels = model(tokens[:, :-1].flatten()), tokens[:, 1:].flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=0, reduction="sum")
    loss.backward()
    return Totals(loss.detach(), int((labels != 0).sum()))


runner = StepRunner(
    model,
    forward_backward,
    limit=RowLimit(16),  # maximum rows of a microbatch; it shrinks if a rank runs out of memory
    kind=SampleKind(length_of=len, filler=lambda _: torch.zeros(2, dtype=torch.long)),  # only padding
)
# Simulates the memory of a GPU: rank 1 has too little for 16 samples at once.
with MemoryMeter(cap_bytes=15_000_000 if rank == 1 else None):
    for step in range(1, 9):
        lengths = torch.randint(8, 64, (16,)).tolist()
        result = runner.run([torch.arange(1, length) for length in lengths], step=step)
        for parameter in model.parameters():  # from the average over ranks to the mean over target tokens
            parameter.grad.mul_(ranks / result.target_tokens)
        with runner.committing("optimizer.step", last_checkpoint=None):  # reports out-of-memory errors
            optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            loss = result.loss_sum.item() / result.target_tokens
            print(f"step {step}: loss {loss:.4f}, at most {runner.limit.rows} rows in a microbatch")
runner.close()
dist.destroy_process_group()
