"""A tokenizer for scripts that need one; it downloads nothing."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def save_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """Save a tokenizer of a dozen words with a chat template; return it."""
    words = ["<unk>", "<pad>", "<eos>", "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(Path(folder))
    return fast
