"""TRL's SFTTrainer with packing and LoRA."""

# bytes: 494e6 * 4
from datasets import Dataset
from peft import LoraConfig
from tokenizer import save_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config
from trl import SFTConfig, SFTTrainer

tokenizer = save_tokenizer("tokenizer")
config = Qwen2Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
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
