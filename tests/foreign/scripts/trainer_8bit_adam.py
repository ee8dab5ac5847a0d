"""transformers' Trainer with bitsandbytes' 8-bit AdamW: Qwen2.5 1.5B in bf16."""

# bytes: 1.544e9 * (2 + 2 + 2)
# at most: 1.35
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen2Config, Trainer, TrainingArguments

config = Qwen2Config(
    vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
    num_key_value_heads=2, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
data = Dataset.from_dict({"input_ids": [[1] * 64] * 16, "labels": [[1] * 64] * 16})
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=1,
    max_steps=3,
    optim="adamw_8bit",
    gradient_checkpointing=True,
    report_to=[],
    save_strategy="no",
)
Trainer(model, arguments, train_dataset=data).train()
