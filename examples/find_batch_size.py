"""A plain PyTorch + FSDP2 loop that finds its batch size before it trains. No torchtune, no GPU:

torchrun --nproc_per_node 2 examples/find_batch_size.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtune_adaptive import (
    MemoryMeter,
    RowLimit,
    SampleKind,
    StepRunner,
    Totals,
    TrainingStep,
    find_max_batch_size,
    search_table,
)

LENGTH = 64

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)]
model = nn.Sequential(nn.Embedding(1000, 128), *layers, nn.LayerNorm(128), nn.Linear(128, 1000))
for module in [*layers, model]:
    fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def forward_backward(samples):
    """One microbatch. The loss is a sum, so that a sample counts the same however the step is split."""
    tokens = torch.stack(samples)
    loss = F.cross_entropy(model(tokens[:, :-1].flatten()), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return Totals(loss.detach(), tokens[:, 1:].numel())


def update(result):
    """Update the weights after the backward. FSDP averages over ranks; the loss is a mean over target tokens."""
    for parameter in model.parameters():
        parameter.grad.mul_(ranks / result.target_tokens)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


runner = StepRunner(
    model, forward_backward, limit=RowLimit(1), kind=SampleKind(length_of=len, filler=lambda sample: sample[:2])
)
step = TrainingStep(
    runner=runner,
    sample=torch.zeros(LENGTH, dtype=torch.long),  # the longest possible sample
    update=update,
    optimizers=[optimizer],
    boundaries={"layers": model[-2], "head": model[-1]},  # each ends a phase; with phases, a search needs fewer probes
)
# The meter simulates the memory of a GPU; rank 1 has less. On a GPU, omit the meter.
with MemoryMeter(cap_bytes=30_000_000 if rank == 0 else 25_000_000) as meter:
    meter.count([*model.parameters(), *model.buffers()])
    found = find_max_batch_size(step, memory=meter)  # the same on all ranks; the model stays unchanged
    if rank == 0:
        print(search_table(found, LENGTH))
    runner.use_limit(RowLimit(found.rows))
    for number in range(1, 4):
        samples = [torch.randint(0, 1000, (LENGTH,)) for _ in range(found.rows)]
        result = runner.run(samples, step=number)
        with runner.committing("the update", last_checkpoint=None):
            update(result)
        optimizer.zero_grad()
        if rank == 0:
            loss = result.loss_sum.item() / result.target_tokens
            print(f"step {number}: loss {loss:.4f}, {found.rows} rows, out of memory {result.recoveries} times")
runner.close()
dist.destroy_process_group()
