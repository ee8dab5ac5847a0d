"""transformers' Trainer: Llama 3.1 8B under FSDP2 on 8 GPUs, bf16 autocast over fp32 weights."""

# command: --ranks 8 --steps 2 -- accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 SCRIPT
# bytes: 8.03e9 * (4 + 4 + 8) / 8
# at most: 3
from datasets import Dataset
from models import llama_8b
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

config = llama_8b()
model = AutoModelForCausalLM.from_config(config)
data = Dataset.from_dict({"input_ids": [[1] * 512] * 64, "labels": [[1] * 512] * 64})
arguments = TrainingArguments("out", per_device_train_batch_size=1, bf16=True, report_to=[], save_strategy="no")
Trainer(model, arguments, train_dataset=data).train()
