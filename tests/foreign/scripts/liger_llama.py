"""liger-kernel: Llama 3.2 1B with fused kernels and a fused linear loss, 8192 tokens."""

# bytes: 1.236e9 * (2 + 2 + 4 + 2)
import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import AutoModelForCausalLM, LlamaConfig

apply_liger_kernel_to_llama()
config = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(128256, (1, 8192), device="cuda")
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
