"""Configs of models and a tokenizer for the scripts of this folder."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def qwen2_half_billion(**more: object) -> Qwen2Config:
    """Return the config of Qwen2.5 0.5B."""
    return Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, **more,
    )  # fmt: skip


def llama_1b() -> LlamaConfig:
    """Return the config of Llama 3.2 1B."""
    return LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip


def llama_8b() -> LlamaConfig:
    """Return the config of Llama 3.1 8B."""
    return LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip


def save_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """Save a tokenizer of a dozen words with a chat template; return it."""
    words = ["<unk>", "<pad>", "<eos>", "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(Path(folder))
    return fast
