"""A Hugging Face model under FSDP2: finds its batch size, then survives a rank that runs out of memory. No GPU needed:

pip install '.[hf]'
torchrun --nproc_per_node 2 examples/transformers_fsdp2.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

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

LENGTH, STEPS = 64, 6
IGNORED = -100

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
# Random weights, to avoid a download. After from_pretrained, call fully_shard in the same way.
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
)
for layer in model.model.layers:
    fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def forward_backward(samples):
    """Run one microbatch. The loss is a sum, so that the weight of a sample does not depend on its microbatch."""
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=IGNORED)[:, 1:]
    logits = model(input_ids=tokens).logits[:, :-1]  # causal attention does not see the padding at the end
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    loss.backward()
    return Totals(loss.detach(), int((labels != IGNORED).sum()))


def update(result):
    """Update the weights after the backward. FSDP averages over ranks; the loss is a mean over target tokens."""
    for parameter in model.parameters():
        parameter.grad.mul_(ranks / result.target_tokens)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def sample():
    """Return consecutive integers, a pattern that the model can learn."""
    start, length = torch.randint(0, 400, ()).item(), torch.randint(8, LENGTH + 1, ()).item()
    return torch.arange(start, start + length)


runner = StepRunner(
    model, forward_backward, limit=RowLimit(1), kind=SampleKind(length_of=len, filler=lambda tokens: tokens[:2])
)
step = TrainingStep(
    runner=runner,
    sample=torch.arange(LENGTH),  # the longest possible sample
    update=update,
    optimizers=[optimizer],
    boundaries={
        "layers": model.model.norm,
        "head": model.lm_head,
    },  # a phase ends with each of these modules; with them, a search needs fewer probes
)
# Simulates the memory of a GPU. On a GPU, omit it: find_max_batch_size measures the GPU by default.
memory = MemoryMeter(20_000_000)
memory.count([*model.parameters(), *model.buffers()])
with memory:
    found = find_max_batch_size(step, memory=memory)  # the same on all ranks; the model stays unchanged
    if rank == 0:
        print(search_table(found, LENGTH))
runner.use_limit(RowLimit(found.rows))
torch.manual_seed(rank)
with memory:
    for number in range(1, STEPS + 1):
        if rank == 1 and number == 3:  # simulates another process that takes memory of this GPU
            memory.cap_bytes = memory.peak_bytes * 3 // 4
        result = runner.run([sample() for _ in range(found.rows)], step=number)
        with runner.committing("the update", last_checkpoint=None):
            update(result)
        optimizer.zero_grad()
        if rank == 0:
            loss = result.loss_sum.item() / result.target_tokens
            print(f"step {number}: loss {loss:.4f}, at most {runner.limit}, recoveries: {result.recoveries}")
runner.close()
dist.destroy_process_group()
