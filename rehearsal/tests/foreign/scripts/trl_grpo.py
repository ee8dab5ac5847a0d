"""TRL's GRPOTrainer with transformers' own generation."""

# bytes: 494e6 * (4 + 4 + 8)
from datasets import Dataset
from models import qwen2_half_billion, save_tokenizer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

tokenizer = save_tokenizer("tokenizer")
config = qwen2_half_billion()
data = Dataset.from_dict({"prompt": ["the quick brown fox"] * 32})
arguments = GRPOConfig(
    "out", per_device_train_batch_size=4, num_generations=4, max_completion_length=32, max_steps=2, report_to=[],
    save_strategy="no",
    bf16=False, beta=0.0,
)  # fmt: skip
GRPOTrainer(
    AutoModelForCausalLM.from_config(config),
    lambda completions, **_: [0.0] * len(completions),
    arguments,
    data,
    processing_class=tokenizer,
).train()
