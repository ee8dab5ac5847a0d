"""TRL's SFTTrainer with packing and LoRA."""

# bytes: 494e6 * 4
from datasets import Dataset
from models import qwen2_half_billion, save_tokenizer
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

tokenizer = save_tokenizer("tokenizer")
config = qwen2_half_billion()
data = Dataset.from_dict({"text": ["the quick brown fox jumps over the lazy dog"] * 512})
arguments = SFTConfig(
    "out", max_length=256, packing=True, per_device_train_batch_size=2, max_steps=2, report_to=[], save_strategy="no"
)
SFTTrainer(
    AutoModelForCausalLM.from_config(config),
    arguments,
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(),
).train()
