"""Llama 3.1 8B in plain PyTorch, under FSDP2 and tensor parallelism. Look for hangs of 64 ranks without a GPU:

rehearse --ranks 64 --together --once -- examples/llama_8b_fsdp2_tp.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, DIM, HIDDEN, KV_HEADS, HEAD_DIM = 128256, 4096, 14336, 8, 128
parser = argparse.ArgumentParser()
for option, default in ("layers", 32), ("tensor_parallel", 8), ("steps", 2):
    parser.add_argument(f"--{option}", type=int, default=default)
LAYERS, TP, STEPS = vars(parser.parse_args()).values()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        q, k, v = (part(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        normed = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
mesh = init_device_mesh("cuda", (ranks // TP, TP), mesh_dim_names=("dp", "tp"))
with torch.device("meta"):
    layers = [Layer() for _ in range(LAYERS)]
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, DIM), *layers, nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
    )
gathers, scatters = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
plan: dict[str, ParallelStyle] = dict.fromkeys(("q", "k", "v", "gate", "up"), gathers) | dict.fromkeys(
    ("out", "down"), scatters
)
plan |= dict.fromkeys(("before_attention", "before_mlp"), SequenceParallel())
for layer in layers:
    parallelize_module(layer, mesh["tp"], plan)
parallelize_module(
    model,
    mesh["tp"],
    {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        str(LAYERS + 1): SequenceParallel(),
        str(LAYERS + 2): ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
)
in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for module in [*layers, model]:
    fully_shard(module, mp_policy=in_bf16, mesh=mesh["dp"])
model.to_empty(device="cuda").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(STEPS):
    tokens = torch.randint(0, VOCABULARY, (1, 2049), device="cuda")
    logits = model(tokens[:, :-1]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(step, loss.item())
dist.destroy_process_group()
