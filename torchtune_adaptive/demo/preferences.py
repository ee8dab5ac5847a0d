"""Pairs of answers to the demo's tasks, made from a seed: the right one is chosen, one with a slip in it rejected."""

from __future__ import annotations

import random

from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, InputOutputToMessages

from torchtune_adaptive.demo.dataset import demo_row
from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.errors import ConfigError


class DemoPreferences(Dataset[dict[str, list[int]]]):
    """Pairs as torchtune's PreferenceDataset gives them, made when asked for."""

    def __init__(self, tokenizer: DemoTokenizer, *, samples: int, seed: int) -> None:
        if samples < 1:
            raise ConfigError(f"dataset.samples is {samples}; it must be at least 1")
        self._tokenizer = tokenizer
        self._samples = samples
        self._seed = seed
        self._to_messages = InputOutputToMessages()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of a dataset of {self._samples}")
        row = demo_row(self._seed, index)
        worse = {**row, "output": _slip(row["output"], random.Random(f"slip/{self._seed}/{index}"))}
        return {**self._tokenized("chosen", row), **self._tokenized("rejected", worse)}

    def _tokenized(self, name: str, row: dict[str, str]) -> dict[str, list[int]]:
        found = self._tokenizer(self._to_messages(row))
        pairs = zip(found["tokens"], found["mask"], strict=True)
        labels = [CROSS_ENTROPY_IGNORE_IDX if masked else token for token, masked in pairs]
        return {f"{name}_input_ids": found["tokens"], f"{name}_labels": labels}


def _slip(answer: str, draw: random.Random) -> str:
    """The answer with its items in disorder, and one of them twice, so that it is not the same for any list."""
    items = answer.split()
    draw.shuffle(items)
    return " ".join([*items, draw.choice(items)])


def demo_preferences(tokenizer: DemoTokenizer, *, samples: int = 512, seed: int = 0) -> DemoPreferences:
    """Component for a config's `dataset:`. A larger dataset begins with the pairs of a smaller one."""
    return DemoPreferences(tokenizer, samples=samples, seed=seed)
