"""Data made from a seed: instructions, pairs of answers to them, and prompts.

An instruction is a list to sort, reverse, add up or count. Lengths follow a log-normal distribution, as those of real
instruction data roughly do: most samples are short, a few are ten times as long. That tail is what makes the memory of
a batch hard to foresee.
"""

import math
import random
from collections.abc import Callable
from functools import partial

from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, InputOutputToMessages
from torchtune.datasets import PackedDataset

from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.errors import ConfigError

DemoSample = dict[str, list[int]]

MEDIAN_ITEMS = 6
SPREAD = 0.8
MOST_ITEMS = 120

# fmt: off
WORDS = (
    "apple", "bread", "cloud", "dance", "eagle", "field", "glass", "house", "island", "jacket", "kettle",
    "lemon", "maple", "night", "ocean", "paper", "queen", "river", "ship", "table", "valley", "water",
    "yellow", "zebra",
)
# fmt: on

TASKS: dict[str, Callable[[list[str]], list[str]]] = {
    "Reverse the words": lambda words: words[::-1],
    "Sort the words": sorted,
    "Count the words": lambda words: [str(len(words))],
    "Sort the numbers": lambda numbers: sorted(numbers, key=int),
    "Add the numbers": lambda numbers: [str(sum(map(int, numbers)))],
}


class DemoDataset(Dataset[DemoSample]):
    """So many samples, each made from its index when asked for: a larger dataset begins with those of a smaller one."""

    def __init__(self, samples: int, make: Callable[[int], DemoSample]) -> None:
        if type(samples) is not int or samples < 1:
            raise ConfigError(f"dataset.samples is {samples!r}: allowed is a whole number of at least 1")
        self._samples = samples
        self._make = make

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> DemoSample:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of a dataset of {self._samples}")
        return self._make(index)


def demo_dataset(
    tokenizer: DemoTokenizer,
    *,
    samples: int = 512,
    seed: int = 0,
    train_on_input: bool = False,
    packed: bool = False,
) -> DemoDataset | PackedDataset:
    """Component for a config's `dataset:`: instructions and their answers."""
    if not isinstance(packed, bool):
        raise ConfigError(f"dataset.packed is {packed!r}: allowed is True or False")
    dataset = DemoDataset(samples, partial(demo_sample, tokenizer, seed, train_on_input=train_on_input))
    if not packed:
        return dataset
    if tokenizer.max_seq_len is None:
        raise ConfigError(
            "dataset.packed is True, but tokenizer.max_seq_len is null and a pack needs a length; "
            "set tokenizer.max_seq_len"
        )
    return PackedDataset(dataset, max_seq_len=tokenizer.max_seq_len, padding_idx=tokenizer.pad_id)


def demo_preferences(tokenizer: DemoTokenizer, *, samples: int = 512, seed: int = 0) -> DemoDataset:
    """Component for a config's `dataset:`: the right answer is chosen, one with a slip in it rejected."""

    def pair(index: int) -> DemoSample:
        row, draw = demo_row(seed, index), random.Random(f"slip/{seed}/{index}")
        items = row["output"].split()
        draw.shuffle(items)
        slip = " ".join([*items, draw.choice(items)])  # one item twice, so that it is not the same for any list
        sample: DemoSample = {}
        for name, answer in (("chosen", row), ("rejected", {**row, "output": slip})):
            one = _tokenized(tokenizer, answer)
            sample |= {f"{name}_input_ids": one["tokens"], f"{name}_labels": one["labels"]}
        return sample

    return DemoDataset(samples, pair)


def demo_prompts(tokenizer: DemoTokenizer, *, samples: int = 512, seed: int = 0) -> DemoDataset:
    """Component for a config's `dataset:`: prompts without any letter, so that a share of letters is the answer's."""

    def prompt(index: int) -> DemoSample:
        draw = random.Random(f"prompt/{seed}/{index}")
        text = f"{draw.randrange(100)} {draw.choice('+-*')} {draw.randrange(100)} ="
        tokens = tokenizer.encode(text, add_eos=False)[: tokenizer.max_seq_len]
        return {"tokens": tokens, "labels": list(tokens)}

    return DemoDataset(samples, prompt)


def demo_row(seed: int, index: int) -> dict[str, str]:
    """One instruction and its answer; depends on nothing but the two numbers."""
    draw = random.Random(f"{seed}/{index}")
    instruction = draw.choice(list(TASKS))
    count = min(MOST_ITEMS, math.ceil(draw.lognormvariate(math.log(MEDIAN_ITEMS), SPREAD)))
    if instruction.endswith("numbers"):
        items = [str(draw.randrange(100)) for _ in range(count)]
    else:
        items = draw.choices(WORDS, k=count)
    return {
        "input": f"{instruction}: {' '.join(items)}",
        "output": " ".join(TASKS[instruction](items)),
    }


def demo_sample(tokenizer: DemoTokenizer, seed: int, index: int, *, train_on_input: bool = False) -> DemoSample:
    return _tokenized(tokenizer, demo_row(seed, index), train_on_input=train_on_input)


def _tokenized(tokenizer: DemoTokenizer, row: dict[str, str], *, train_on_input: bool = False) -> DemoSample:
    """Tokens and labels, as torchtune's SFTDataset gives them."""
    sample = tokenizer(InputOutputToMessages(train_on_input=train_on_input)(row))
    pairs = zip(sample["tokens"], sample["mask"], strict=True)
    labels = [CROSS_ENTROPY_IGNORE_IDX if masked else token for token, masked in pairs]
    return {"tokens": sample["tokens"], "labels": labels}
