"""QLoRA (LoRA of rank 16) on NF4 weights of Llama 3.1 8B, with bitsandbytes' paged optimizer."""

# bytes: 6.98e9 * (0.5 + 4 / 64) + 1.05e9 * 4
import torch
from datasets import Dataset
from models import llama_8b
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

config = llama_8b()
config.save_pretrained("llama")
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("llama", quantization_config=nf4, dtype=torch.bfloat16, device_map={"": 0})
model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=16, target_modules="all-linear"))
data = Dataset.from_dict({"input_ids": [[1] * 128] * 16, "labels": [[1] * 128] * 16})
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=1,
    max_steps=2,
    bf16=True,
    optim="paged_adamw_8bit",
    report_to=[],
    save_strategy="no",
)
Trainer(model, arguments, train_dataset=data).train()
