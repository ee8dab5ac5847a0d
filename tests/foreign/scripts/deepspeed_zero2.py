"""DeepSpeed with ZeRO 2: Qwen2.5 0.5B in bf16 on 8 GPUs."""

# command: -- torchrun --nproc_per_node 8 SCRIPT
# bytes: 494e6 * (2 + 12 / 8 + 2 / 8) + 5e8 * 2
# at most: 1.35
import deepspeed
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

config = Qwen2Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    "gradient_clipping": 1.0,
}
engine, *_ = deepspeed.initialize(model=AutoModelForCausalLM.from_config(config), config=settings)
for _ in range(3):
    tokens = torch.randint(151936, (1, 64), device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
