"""TRL's DPOTrainer with a reference model."""

# bytes: 494e6 * (4 + 4 + 8 + 4)
from datasets import Dataset
from tokenizer import save_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config
from trl import DPOConfig, DPOTrainer

tokenizer = save_tokenizer("tokenizer")
config = Qwen2Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
model, reference = (AutoModelForCausalLM.from_config(config) for _ in range(2))
data = Dataset.from_dict({"prompt": ["the quick"] * 32, "chosen": [" brown fox"] * 32, "rejected": [" lazy dog"] * 32})
arguments = DPOConfig("out", per_device_train_batch_size=1, max_steps=3, report_to=[], save_strategy="no", bf16=False)
DPOTrainer(model, reference, arguments, train_dataset=data, processing_class=tokenizer).train()
