"""Llama 3.1 8B, made from its configuration, under FSDP2. Needs eight GPUs, or none:

pip install '.[hf]'
tune-adaptive rehearse --ranks 8 --memory 80GB -- examples/llama_8b_fsdp2.py --rows 1
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=1)
rows = parser.parse_args().rows

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
config = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    use_cache=False,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for layer in [*model.model.layers, model]:
    fully_shard(layer, mp_policy=in_bf16)
model.to_empty(device="cuda").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

for length in (1024, 4096, 2048, 3072, 4096):  # of the longest sample of a step
    tokens = torch.randint(0, 128256, (rows, length), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
