"""TRL's DPOTrainer with a reference model."""

# bytes: 494e6 * (4 + 4 + 8 + 4)
from datasets import Dataset
from models import qwen2_half_billion, save_tokenizer
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

tokenizer = save_tokenizer("tokenizer")
config = qwen2_half_billion()
model, reference = (AutoModelForCausalLM.from_config(config) for _ in range(2))
data = Dataset.from_dict({"prompt": ["the quick"] * 32, "chosen": [" brown fox"] * 32, "rejected": [" lazy dog"] * 32})
arguments = DPOConfig("out", per_device_train_batch_size=1, max_steps=3, report_to=[], save_strategy="no", bf16=False)
DPOTrainer(model, reference, arguments, train_dataset=data, processing_class=tokenizer).train()
