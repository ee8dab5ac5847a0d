"""Models with less than half a million parameters, and a function that constructs useful weights without training."""

import math
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
    """Return the demo model, for `model._component_`; `overrides` are arguments of torchtune's `llama3`."""
    return llama3(**{**SIZES, **overrides})


def lora_demo_model(**overrides: Any) -> TransformerDecoder:
    """Return the demo model with LoRA; `overrides` are arguments of torchtune's `lora_llama3`."""
    return lora_llama3(**{**SIZES, "lora_rank": 8, "lora_alpha": 16, **overrides})


CLASSIFIER_SIZES = {**SIZES, "num_layers": 2, "embed_dim": 64, "intermediate_dim": 128, "max_seq_len": 512}
CONSTANT = 100.0
"""A value in the embedding of every token, so large that it dominates the normalization."""


def demo_classifier(**overrides: Any) -> TransformerDecoder:
    """Return a value or reward model for PPO; `overrides` are arguments of torchtune's `mistral_classifier`."""
    return mistral_classifier(**{**CLASSIFIER_SIZES, "num_classes": 1, **overrides})


def lowercase_share_weights() -> dict[str, Tensor]:
    """Return weights of a reward model whose output is the fraction of lowercase letters among the tokens so far.

    One value of a token's embedding marks lowercase letters. The first layer averages this value over all tokens, and
    the second layer adds zero.
    """
    weights = {name: torch.zeros_like(weight) for name, weight in demo_classifier().state_dict().items()}
    for name, weight in weights.items():
        if name.endswith("norm.scale"):
            weight.fill_(1.0)
    scale = math.sqrt(CLASSIFIER_SIZES["embed_dim"]) / CONSTANT  # factor of the normalization
    weights["tok_embeddings.weight"][:, 0] = CONSTANT
    weights["tok_embeddings.weight"][torch.tensor([*ascii_lowercase.encode()]), 1] = 1.0
    # Queries and keys are zero, so attention averages the values. The fraction is the first value of every head.
    weights["layers.0.attn.v_proj.weight"][0, 1] = 1.0
    weights["layers.0.attn.output_proj.weight"][2, 0] = 1.0 / scale
    weights["output.weight"][0, 2] = 1.0 / scale
    return weights
