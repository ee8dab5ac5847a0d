"""What the demo of PPO needs besides a policy: prompts, and a value and a reward model of one architecture.

The reward can be checked by eye: it is the share of small letters, a to z, in prompt and answer. No training has made
the model say so; its weights are written down. The first layer attends to all tokens alike and so takes their mean, of
which one number is whether a token is a small letter; the second layer adds nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torchtune.models.mistral._component_builders import mistral_classifier
from torchtune.modules import TransformerDecoder
from torchtune.training import FullModelTorchTuneCheckpointer

from torchtune_adaptive.demo.dataset import DemoDataset, DemoSample
from torchtune_adaptive.demo.tokenizer import VOCAB_SIZE, DemoTokenizer
from torchtune_adaptive.demo.weights import ensure_made

VALUE_FILE, REWARD_FILE = "demo_value.pt", "demo_reward.pt"
SIZES = {
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
    return mistral_classifier(**{**SIZES, **overrides})


def demo_classifier_checkpointer(
    checkpoint_dir: str,
    output_dir: str,
    checkpoint_files: Sequence[str],
    model_type: str = "LLAMA3",
    should_load_recipe_state: bool = False,
) -> FullModelTorchTuneCheckpointer:
    """Component for a config's `value_checkpointer:` and `reward_checkpointer:`: torchtune's own, after seeing to it
    that `demo_value.pt` or `demo_reward.pt` is there. Every rank may call this at once."""
    if VALUE_FILE in checkpoint_files:
        ensure_made(Path(checkpoint_dir) / VALUE_FILE, lambda: demo_classifier().state_dict())
    if REWARD_FILE in checkpoint_files:
        ensure_made(Path(checkpoint_dir) / REWARD_FILE, small_letters)
    return FullModelTorchTuneCheckpointer(
        checkpoint_dir=checkpoint_dir,
        checkpoint_files=list(checkpoint_files),
        model_type=model_type,
        output_dir=output_dir,
        should_load_recipe_state=should_load_recipe_state,
    )


def small_letters() -> dict[str, Tensor]:
    """The weights of a model that says, at each token, which share of the tokens so far are small letters."""
    weights = {name: torch.zeros_like(weight) for name, weight in demo_classifier().state_dict().items()}
    for name, weight in weights.items():
        if name.endswith("norm.scale"):
            weight.fill_(1.0)
    width = SIZES["embed_dim"]
    normalised = math.sqrt(width) / CONSTANT  # what normalising makes of a number
    weights["tok_embeddings.weight"][:, 0] = CONSTANT
    weights["tok_embeddings.weight"][torch.tensor([*ascii_lowercase.encode()]), 1] = 1.0
    # Without queries and keys, attention is the mean of the values. Every head has the share at its first place.
    head = width // SIZES["num_heads"]
    weights["layers.0.attn.v_proj.weight"][0, 1] = 1.0
    weights["layers.0.attn.output_proj.weight"][2, 0] = 1.0 / normalised
    assert weights["layers.0.attn.v_proj.weight"].shape[0] == head * SIZES["num_kv_heads"]
    weights["output.weight"][0, 2] = 1.0 / normalised
    return weights


def _prompt(tokenizer: DemoTokenizer, seed: int, index: int) -> DemoSample:
    """A short beginning without any letter: a share of letters is the answer's doing."""
    draw = random.Random(f"prompt/{seed}/{index}")
    text = f"{draw.randrange(100)} {draw.choice('+-*')} {draw.randrange(100)} ="
    tokens = tokenizer.encode(text, add_eos=False)[: tokenizer.max_seq_len]
    return {"tokens": tokens, "labels": list(tokens)}


def demo_prompts(tokenizer: DemoTokenizer, *, samples: int = 512, seed: int = 0) -> DemoDataset:
    """Component for a config's `dataset:`."""
    return DemoDataset(samples, partial(_prompt, tokenizer, seed))
