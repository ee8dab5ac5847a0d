"""Generation with a KV cache: Llama 3.2 1B, 256 new tokens for 8 prompts."""

# bytes: 1.236e9 * 2 + 8 * 512 * 16 * 2 * 8 * 64 * 2
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
prompts = torch.randint(128256, (8, 256)).cuda()
model.generate(prompts, max_new_tokens=256, do_sample=True)
