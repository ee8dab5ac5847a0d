"""Qwen2.5 0.5B in bf16 on 8 GPUs with DeepSpeed's ZeRO."""

# command: -- torchrun --nproc_per_node 8 SCRIPT 1
# bytes: 494e6 * (2 + 2 + 12 / 8) + 5e8 * 2
# at most: 1.35
# command: -- torchrun --nproc_per_node 8 SCRIPT 2
# bytes: 494e6 * (2 + 12 / 8 + 2 / 8) + 5e8 * 2
# at most: 1.35
# command: -- torchrun --nproc_per_node 8 SCRIPT 3
# bytes: 494e6 * (2 + 2 + 12) / 8 + 5e8 * 2 + 2 * 136e6 * 2
# at most: 1.4
import sys

import deepspeed
import torch
from models import qwen2_half_billion
from transformers import AutoModelForCausalLM

config = qwen2_half_billion()
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": int(sys.argv[1])},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    "gradient_clipping": 1.0,
}
engine, *_ = deepspeed.initialize(model=AutoModelForCausalLM.from_config(config), config=settings)
for _ in range(3):
    tokens = torch.randint(151936, (1, 64), device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
