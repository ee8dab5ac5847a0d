"""Llama 3.1 8B in plain PyTorch, under FSDP2. Train it on eight GPUs, or rehearse it without a GPU:

rehearse --ranks 8 --memory 80GB -- examples/llama_8b_fsdp2.py --rows 1
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY, DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128256, 4096, 14336, 32, 32, 8, 128


def rotated(x: Tensor) -> Tensor:
    """Apply rotary position embeddings to the heads of queries or keys."""
    frequencies = 500_000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), frequencies)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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
        heads = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        normed = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=1)
rows = parser.parse_args().rows

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
with torch.device("meta"):
    layers = [Layer() for _ in range(LAYERS)]
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, DIM), *layers, nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
    )
in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for module in [*layers, model]:
    fully_shard(module, mp_policy=in_bf16)
model.to_empty(device="cuda").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

for length in (1024, 4096, 2048, 3072, 4096):  # tokens of the longest sample in each step
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), device="cuda")
    logits = model(tokens[:, :-1]).float()
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
