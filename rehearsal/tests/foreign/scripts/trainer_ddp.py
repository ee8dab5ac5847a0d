"""transformers' Trainer: GPT-2 medium under DDP on 2 GPUs; DDP keeps a second copy of the gradients."""

# command: -- torchrun --nproc_per_node 2 SCRIPT
# bytes: 354.8e6 * (4 + 4 + 8 + 4)
from datasets import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=1024, n_layer=24, n_head=16))
data = Dataset.from_dict({"input_ids": [[1] * 128] * 64, "labels": [[1] * 128] * 64})
arguments = TrainingArguments("out", per_device_train_batch_size=1, max_steps=3, report_to=[], save_strategy="no")
Trainer(model, arguments, train_dataset=data).train()
