"""A Llama 3 of less than half a million parameters, for the demo tokenizer's vocabulary."""

from collections.abc import Sequence
from typing import Any

from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules import TransformerDecoder

from torchtune_adaptive.demo.tokenizer import VOCAB_SIZE

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 128,
    "intermediate_dim": 192,
    "max_seq_len": 2048,
}


def demo_model(**overrides: Any) -> TransformerDecoder:
    """Component for a config's `model:`; `overrides` are arguments of torchtune's `llama3`."""
    return llama3(**{**SIZES, **overrides})


def lora_demo_model(
    lora_attn_modules: Sequence[str],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    **overrides: Any,
) -> TransformerDecoder:
    """The same model with LoRA; `overrides` are further arguments of torchtune's `lora_llama3`."""
    return lora_llama3(
        lora_attn_modules=lora_attn_modules,
        apply_lora_to_mlp=apply_lora_to_mlp,
        apply_lora_to_output=apply_lora_to_output,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        **{**SIZES, **overrides},
    )
