"""TRL's RewardTrainer."""

# bytes: 494e6 * (4 + 4 + 8)
from datasets import Dataset
from models import qwen2_half_billion, save_tokenizer
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

tokenizer = save_tokenizer("tokenizer")
config = qwen2_half_billion(num_labels=1, pad_token_id=0)
data = Dataset.from_dict({"chosen": ["the quick brown fox"] * 32, "rejected": ["the lazy dog"] * 32})
arguments = RewardConfig(
    "out", per_device_train_batch_size=1, max_steps=3, report_to=[], save_strategy="no", bf16=False
)
RewardTrainer(
    AutoModelForSequenceClassification.from_config(config), arguments, train_dataset=data, processing_class=tokenizer
).train()
