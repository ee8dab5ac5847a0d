"""Models of less than half a million parameters, for the demo tokenizer's vocabulary."""

import math
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.models.mistral._component_builders import mistral_classifier
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


CLASSIFIER_SIZES = {
    "num_classes": 1,
    "vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 128,
    "max_seq_len": 512,
}
CONSTANT = 100.0
"""A number that is the same in every token, and so large that normalising divides by it and by little else."""


def demo_classifier(**overrides: Any) -> TransformerDecoder:
    """Component for a config's `reward_and_value_model:`; `overrides` are arguments of torchtune's classifier."""
    return mistral_classifier(**{**CLASSIFIER_SIZES, **overrides})


def small_letters() -> dict[str, Tensor]:
    """Weights of a classifier that says, at each token, which share of the tokens so far are small letters.

    No training has made it: the first layer attends to all tokens alike and so takes their mean, of which one number is
    whether a token is a small letter; the second layer adds nothing.
    """
    weights = {name: torch.zeros_like(weight) for name, weight in demo_classifier().state_dict().items()}
    for name, weight in weights.items():
        if name.endswith("norm.scale"):
            weight.fill_(1.0)
    width = CLASSIFIER_SIZES["embed_dim"]
    normalised = math.sqrt(width) / CONSTANT  # what normalising makes of a number
    weights["tok_embeddings.weight"][:, 0] = CONSTANT
    weights["tok_embeddings.weight"][torch.tensor([*ascii_lowercase.encode()]), 1] = 1.0
    # Without queries and keys, attention is the mean of the values. Every head has the share at its first place.
    head = width // CLASSIFIER_SIZES["num_heads"]
    weights["layers.0.attn.v_proj.weight"][0, 1] = 1.0
    weights["layers.0.attn.output_proj.weight"][2, 0] = 1.0 / normalised
    assert weights["layers.0.attn.v_proj.weight"].shape[0] == head * CLASSIFIER_SIZES["num_kv_heads"]
    weights["output.weight"][0, 2] = 1.0 / normalised
    return weights
