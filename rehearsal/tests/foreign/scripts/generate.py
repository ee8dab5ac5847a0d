"""Generation with a KV cache: Llama 3.2 1B, 256 new tokens for 8 prompts."""

# bytes: 1.236e9 * 2 + 8 * 512 * 16 * 2 * 8 * 64 * 2
import torch
from models import llama_1b
from transformers import AutoModelForCausalLM

config = llama_1b()
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
prompts = torch.randint(128256, (8, 256)).cuda()
model.generate(prompts, max_new_tokens=256, do_sample=True)
