"""Pairs of answers to the demo's tasks, made from a seed: the right one is chosen, one with a slip in it rejected."""

from __future__ import annotations

import random
from functools import partial

from torchtune_adaptive.demo.dataset import DemoDataset, DemoSample, demo_row, tokenized
from torchtune_adaptive.demo.tokenizer import DemoTokenizer


def _pair(tokenizer: DemoTokenizer, seed: int, index: int) -> DemoSample:
    """A pair as torchtune's PreferenceDataset gives it."""
    row = demo_row(seed, index)
    worse = {**row, "output": _slip(row["output"], random.Random(f"slip/{seed}/{index}"))}
    pair: DemoSample = {}
    for name, answer in (("chosen", row), ("rejected", worse)):
        sample = tokenized(tokenizer, answer)
        pair |= {f"{name}_input_ids": sample["tokens"], f"{name}_labels": sample["labels"]}
    return pair


def _slip(answer: str, draw: random.Random) -> str:
    """The answer with its items in disorder, and one of them twice, so that it is not the same for any list."""
    items = answer.split()
    draw.shuffle(items)
    return " ".join([*items, draw.choice(items)])


def demo_preferences(tokenizer: DemoTokenizer, *, samples: int = 512, seed: int = 0) -> DemoDataset:
    """Component for a config's `dataset:`. A larger dataset begins with the pairs of a smaller one."""
    return DemoDataset(samples, partial(_pair, tokenizer, seed))
