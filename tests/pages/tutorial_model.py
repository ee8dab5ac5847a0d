"""A tiny stand-in for the model of docs/tutorial.md: files as a download of Qwen2.5 has them, with random weights."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "vocab_size": 512,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 64,
    "max_seq_len": 1024,
    "tie_word_embeddings": True,
}
"""Arguments of torchtune's builder."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with Qwen's special tokens and chat template."""
    from torchtune.models.qwen2_5._tokenizer import QWEN2_5_SPECIAL_TOKENS

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["what is plus count again"] * 2, trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(list(QWEN2_5_SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def write_tiny_model(folder: Path) -> None:
    """Write weights, config and tokenizer, and `special.json`: Qwen's special tokens with small numbers."""
    folder.mkdir(parents=True)
    fast = tiny_tokenizer()
    fast.backend_tokenizer.model.save(str(folder))
    fast.save_pretrained(folder)
    added = [{"id": token, "content": name} for name, token in fast.get_added_vocab().items()]
    (folder / "special.json").write_text(json.dumps({"added_tokens": added}))
    config = Qwen2Config(
        vocab_size=SIZES["vocab_size"],
        hidden_size=SIZES["embed_dim"],
        intermediate_size=SIZES["intermediate_dim"],
        num_hidden_layers=SIZES["num_layers"],
        num_attention_heads=SIZES["num_heads"],
        num_key_value_heads=SIZES["num_kv_heads"],
        tie_word_embeddings=SIZES["tie_word_embeddings"],
        rope_theta=1e6,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
