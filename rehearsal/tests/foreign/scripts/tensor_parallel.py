"""FSDP2 over 4 groups × tensor parallelism over 8 ranks: Llama 70B's layers, eight of them."""

# command: -- torchrun --nnodes 4 --nproc_per_node 8 SCRIPT
# bytes: 8 * 855.6e6 * (4 + 4 + 8 + 4) / 32
# at most: 1.75
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

config = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, attn_implementation="sdpa"
)
mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("data", "tensor"))
with torch.device("meta"):
    layers = torch.nn.ModuleList(LlamaDecoderLayer(config, at) for at in range(8))
plan = {
    "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(), "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}  # fmt: skip
for layer in layers:
    fully_shard(parallelize_module(layer, mesh["tensor"], plan), mesh=mesh["data"])
layers.to_empty(device="cuda")
positions = LlamaRotaryEmbedding(config).cuda()
optimizer = torch.optim.AdamW(layers.parameters())
for _ in range(3):
    hidden = torch.rand(1, 256, 8192, device="cuda")
    angles = positions(hidden, torch.arange(256, device="cuda")[None])
    for layer in layers:
        hidden = layer(hidden, position_embeddings=angles)
    hidden.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
