"""TRL's RewardTrainer."""

# bytes: 494e6 * (4 + 4 + 8)
from datasets import Dataset
from tokenizer import save_tokenizer
from transformers import AutoModelForSequenceClassification, Qwen2Config
from trl import RewardConfig, RewardTrainer

tokenizer = save_tokenizer("tokenizer")
config = Qwen2Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, num_labels=1, pad_token_id=0,
)  # fmt: skip
data = Dataset.from_dict({"chosen": ["the quick brown fox"] * 32, "rejected": ["the lazy dog"] * 32})
arguments = RewardConfig(
    "out", per_device_train_batch_size=1, max_steps=3, report_to=[], save_strategy="no", bf16=False
)
RewardTrainer(
    AutoModelForSequenceClassification.from_config(config), arguments, train_dataset=data, processing_class=tokenizer
).train()
