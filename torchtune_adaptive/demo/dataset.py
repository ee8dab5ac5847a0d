"""Datasets generated from a seed: instructions, pairs of answers, and prompts.

An instruction is a list to sort, reverse, add up or count. Lengths follow a log-normal distribution, like those of real
instructions: most samples are short, and a few are ten times longer. So the memory of a batch is hard to predict.
"""

import math
import random
from collections.abc import Callable
from functools import partial

from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, InputOutputToMessages
from torchtune.datasets import PackedDataset

from torchtune_adaptive.demo.tokenizer import DemoTokenizer

DemoSample = dict[str, list[int]]

MEDIAN_ITEMS = 6
SPREAD = 0.8
MOST_ITEMS = 120

WORDS = (
    "apple bread cloud dance eagle field glass house island jacket kettle lemon "
    "maple night ocean paper queen river ship table valley water yellow zebra"
)

TASKS: dict[str, Callable[[list[str]], list[str]]] = {
    "Reverse the words": lambda words: words[::-1],
    "Sort the words": sorted,
    "Count the words": lambda words: [str(len(words))],
    "Sort the numbers": lambda numbers: sorted(numbers, key=int),
    "Add the numbers": lambda numbers: [str(sum(map(int, numbers)))],
}


class DemoDataset(Dataset[DemoSample]):
    """Generates each sample from its index, so that a larger dataset begins with the samples of a smaller one."""

    def __init__(self, samples: int, make: Callable[[int], DemoSample]) -> None:
        self._samples = samples
        self._make = make

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> DemoSample:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of a dataset of {self._samples}")
        return self._make(index)


def demo_dataset(
    tokenizer: DemoTokenizer, *, samples: int = 512, seed: int = 0, train_on_input: bool = False, packed: bool = False
) -> DemoDataset | PackedDataset:
    """Return a dataset of instructions and their answers, for `dataset._component_`."""
    dataset = DemoDataset(samples, partial(demo_sample, tokenizer, seed, train_on_input=train_on_input))
    if not packed:
        return dataset
    assert tokenizer.max_seq_len is not None, "packs need a length: set tokenizer.max_seq_len"
    return PackedDataset(dataset, max_seq_len=tokenizer.max_seq_len, padding_idx=tokenizer.pad_id)


def demo_preferences(tokenizer: DemoTokenizer, *, samples: int = 512, seed: int = 0) -> DemoDataset:
    """Return a dataset of pairs of a correct (chosen) and a wrong (rejected) answer, for `dataset._component_`."""

    def pair(index: int) -> DemoSample:
        row, draw = demo_row(seed, index), random.Random(f"slip/{seed}/{index}")
        items = row["output"].split()
        draw.shuffle(items)
        wrong = " ".join([*items, draw.choice(items)])  # repeat an item, so that the answer is always wrong
        sample: DemoSample = {}
        for name, answer in (("chosen", row), ("rejected", {**row, "output": wrong})):
            tokenized = _tokenized(tokenizer, answer)
            sample |= {f"{name}_input_ids": tokenized["tokens"], f"{name}_labels": tokenized["labels"]}
        return sample

    return DemoDataset(samples, pair)


def demo_prompts(tokenizer: DemoTokenizer, *, samples: int = 512, seed: int = 0) -> DemoDataset:
    """Return a dataset of prompts for PPO. Prompts have no letters, because the demo's reward counts letters."""

    def prompt(index: int) -> DemoSample:
        draw = random.Random(f"prompt/{seed}/{index}")
        text = f"{draw.randrange(100)} {draw.choice('+-*')} {draw.randrange(100)} ="
        tokens = tokenizer.encode(text, add_eos=False)[: tokenizer.max_seq_len]
        return {"tokens": tokens, "labels": list(tokens)}

    return DemoDataset(samples, prompt)


def demo_row(seed: int, index: int) -> dict[str, str]:
    """Return an instruction and its answer, which depend only on `seed` and `index`."""
    draw = random.Random(f"{seed}/{index}")
    instruction = draw.choice(list(TASKS))
    count = min(MOST_ITEMS, math.ceil(draw.lognormvariate(math.log(MEDIAN_ITEMS), SPREAD)))
    if instruction.endswith("numbers"):
        items = [str(draw.randrange(100)) for _ in range(count)]
    else:
        items = draw.choices(WORDS.split(), k=count)
    return {"input": f"{instruction}: {' '.join(items)}", "output": " ".join(TASKS[instruction](items))}


def demo_sample(tokenizer: DemoTokenizer, seed: int, index: int, *, train_on_input: bool = False) -> DemoSample:
    """Return the tokens and labels of an instruction and its answer."""
    return _tokenized(tokenizer, demo_row(seed, index), train_on_input=train_on_input)


def _tokenized(tokenizer: DemoTokenizer, row: dict[str, str], *, train_on_input: bool = False) -> DemoSample:
    """Return tokens and labels as torchtune's SFTDataset does."""
    sample = tokenizer(InputOutputToMessages(train_on_input=train_on_input)(row))
    pairs = zip(sample["tokens"], sample["mask"], strict=True)
    labels = [CROSS_ENTROPY_IGNORE_IDX if masked else token for token, masked in pairs]
    return {"tokens": sample["tokens"], "labels": labels}
