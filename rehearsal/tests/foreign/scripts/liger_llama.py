"""liger-kernel: Llama 3.2 1B with fused kernels and a fused linear loss, 8192 tokens."""

# bytes: 1.236e9 * (2 + 2 + 4 + 2)
import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from models import llama_1b
from transformers import AutoModelForCausalLM

apply_liger_kernel_to_llama()
config = llama_1b()
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(128256, (1, 8192), device="cuda")
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
