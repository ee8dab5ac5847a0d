"""What the demo of GRPO needs: two digits to sort, a policy that answers with digits at random, and what is right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtune_adaptive.demo.dataset import DemoDataset
from torchtune_adaptive.demo.model import demo_model
from torchtune_adaptive.demo.tokenizer import DemoTokenizer

ASCII = [*b"0123456789"]


def digits_dataset(tokenizer: DemoTokenizer, *, samples: int = 512, seed: int = 0) -> DemoDataset:
    """Component for a config's `dataset:`: prompts such as "73=", whose answer is "37"."""

    def make(index: int) -> Any:
        digits = random.Random(f"digits/{seed}/{index}").choices("0123456789", k=2)
        tokens = tokenizer.encode("".join(digits) + "=", add_eos=False)
        return {"tokens": tokens, "labels": list(tokens), "answer": "".join(sorted(digits))}

    return DemoDataset(samples, make)


def places(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """A reward: the share of places at which an answer is right, its end included."""
    pairs = zip(completions, answer, strict=True)
    return [sum(a == b for a, b in zip([*said, "end"], [*wanted, "end"], strict=False)) / 3 for said, wanted in pairs]


def digits_at_random(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The weights of a model that answers with digits and ends, each about as likely, whatever it is asked: it stands
    for a model that has learnt how answers look, and not yet what is right."""
    weights: dict[str, Tensor] = demo_model(**sizes).state_dict()
    weights["tok_embeddings.weight"][:, 0] = 8.0  # the same in every token, beside numbers of about 1
    weights["output.weight"][:, 0] = 0.0
    weights["output.weight"][torch.tensor([*ASCII, DemoTokenizer().eos_id]), 0] = 1.5
    return weights
