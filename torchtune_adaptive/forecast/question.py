"""What is asked of `adaptive_plan`."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import components
from torchtune_adaptive.config.checks import SECTIONS
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import MOST_TOKENS, Settings, keys_of, read, value_at
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.forecast.keys import PlanSettings
from torchtune_adaptive.forecast.which_recipe import training_of, trains_on_pairs, trains_on_rollouts
from torchtune_adaptive.formatting import did_you_mean, format_bytes, parse_amount
from torchtune_adaptive.rehearse.gpus import GPUS, Gpu
from torchtune_adaptive.rehearse.start import overhead_of
from torchtune_adaptive.rl.settings import GRPO_KEYS, POLICY_SECTION, PPO_KEYS
from torchtune_adaptive.tune.checked_dataset import max_seq_len_of
from torchtune_adaptive.tune.data import build_dataset
from torchtune_adaptive.tune.samples import PAIR, TEXT

Overrides = tuple[str, ...]
"""Changes of a config, as the command line takes them."""
STEPS, STEPS_OF_MANY_LENGTHS = 2, 200
"""Steps to rehearse: at least two, since the first runs its backward before there is any optimizer state."""
LENGTHS = 4099
"""Lengths that are drawn: a prime, so that they come round in other steps."""
ASSUMED_TOKENS = 4096
"""Length of a row where nothing says how long rows are."""
PLAN_KEYS = (*PPO_KEYS, *GRPO_KEYS, *keys_of(PlanSettings))
"""Keys that a question may have beside those of finetuning: its own, and those of rollouts."""


@dataclass(frozen=True)
class Question:
    """A config, what is asked about it, and the command line that asks."""

    cfg: DictConfig
    plan: PlanSettings
    config_name: str
    given: Sequence[str] = ()
    """Everything else on the command line."""

    @property
    def ranks(self) -> int:
        return self.plan.several_ranks[0]

    @property
    def recipe(self) -> str:
        return training_of(self.cfg).name

    @cached_property
    def settings(self) -> Settings:
        """Settings of its recipe, which refuses here what it would refuse in a run."""
        return training_of(self.cfg).read(self.cfg)[0]

    def on(self, ranks: int) -> Question:
        return replace(self, plan=replace(self.plan, world_size=ranks))

    def each(self) -> Iterator[Question]:
        """One question for each number of ranks and each length."""
        lengths = self.plan.sequence_length
        for ranks in self.plan.several_ranks:
            for length in lengths if isinstance(lengths, tuple) else (lengths,):
                yield replace(self, plan=replace(self.plan, world_size=ranks, sequence_length=length))

    def changed(self, overrides: Overrides) -> Question:
        return replace(self, cfg=changed(self.cfg, overrides), given=[*self.given, *overrides])

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of the samples; empty where all are as long as the longest."""
        source = self.plan.lengths
        if source is None:
            return []
        if source == "dataset":
            return _lengths_of_dataset(self.cfg)
        median, _, longest = source.partition(":")
        try:
            if longest:
                return _skewed(int(median), int(longest))
            lengths = [int(word) for word in Path(source).read_text().split()]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"lengths is {source!r} ({error}): set it to a median and the longest, such as 512:4096, to a file "
                "with a number per line, or to dataset"
            ) from error
        if min(lengths, default=0) < 1:
            raise ConfigError(f"lengths: {source} has no lengths, or one below 1: give a number of tokens per line")
        random.Random(0).shuffle(lengths)
        return lengths

    @property
    def length(self) -> int:
        """Tokens of a row, or of the longest; of a prompt, where answers follow."""
        if self.lengths and self.plan.sequence_length is None:
            return max(self.lengths)
        given: Any = self.plan.sequence_length or value_at(self.cfg, "adaptive.sequence_length")
        return int(given or value_at(self.cfg, "tokenizer.max_seq_len") or min(ASSUMED_TOKENS, self.most_tokens))

    @cached_property
    def most_tokens(self) -> int:
        """The longest sequence that the model takes."""
        with torch.device("meta"):
            model = components.build(POLICY_SECTION if POLICY_SECTION in self.cfg else "model", self.cfg)
        return max_seq_len_of([model]) or MOST_TOKENS

    @property
    def steps(self) -> int:
        return self.plan.steps or (STEPS_OF_MANY_LENGTHS if self.lengths else STEPS)

    @property
    def batch_size(self) -> int | None:
        """The size that is asked about; None if the question is which is the largest."""
        asked = any(word.startswith("batch_size=") for word in self.given)
        return int(self.cfg.batch_size) if asked and not self.cfg.get("use_maximum_batch_size") else None

    @property
    def gpu(self) -> Gpu:
        """The card of the rank that has least."""
        memory = self.plan.memory_limit
        if memory is None:
            limits = self.settings.adaptive.memory_limit
            if limits is None or any(limit.is_fraction for limit in limits):
                cards = ", ".join(GPUS)
                raise ConfigError(f"memory_limit is null: set it to an amount (24GiB, 80GB) or a card ({cards})")
            return GPUS["h100"]._replace(memory=min(int(limit.amount) for limit in limits))
        name = str(memory).strip().lower()
        if name in GPUS:
            return GPUS[name]
        try:
            return GPUS["h100"]._replace(memory=parse_amount(memory, "memory_limit"))
        except ConfigError as error:
            cards = did_you_mean(name, GPUS, most=3) or f"; known are {', '.join(GPUS)}"
            raise ConfigError(f"{error}; or a card by its name{cards}") from error

    @property
    def overhead_bytes(self) -> int:
        overhead = self.plan.memory_overhead
        if overhead is None:
            return overhead_of(self.ranks)
        return 0 if overhead == 0 else parse_amount(overhead, "memory_overhead")


def read_question(cfg: DictConfig, config_name: str, given: Sequence[str]) -> Question:
    """Refuses what no card answers, and what the recipe would refuse."""
    question = Question(cfg, read(PlanSettings, cfg), config_name, given)
    keys = {str(key) for key in cfg if value_at(cfg, f"{key!s}.{COMPONENT}") is not None}
    if others := sorted(keys - {*SECTIONS, *PLAN_KEYS}):
        raise ConfigError(
            f"{', '.join(others)}: no recipe that adaptive_plan knows reads this, so it would answer for another "
            f"training: rehearse the recipe itself, tune-adaptive rehearse --ranks {question.ranks} -- tune run RECIPE "
            f"--config {config_name}"
        )
    if not str(cfg.get("device", "cuda")).startswith("cuda"):
        raise ConfigError(f"device is {cfg.device}, which adaptive_plan does not cover: add device=cuda")
    optimizer = str(value_at(cfg, f"optimizer.{COMPONENT}"))
    # no dependency, and half of torchtune's configs for one GPU name it
    if optimizer.startswith("bitsandbytes.") and find_spec("bitsandbytes") is None:
        other = "torchao.optim.AdamW8bit" if optimizer.endswith("8bit") else "torch.optim.AdamW"
        raise ConfigError(
            f"optimizer is {optimizer}, which is not installed: pip install bitsandbytes, or ask about "
            f"optimizer.{COMPONENT}={other}, whose state stays on the GPU"
        )
    question.settings  # noqa: B018
    for each in question.each():
        _check(each)
    return question


def _check(question: Question) -> None:
    """Refuses a card without room, and a length that the model does not take."""
    memory, overhead = question.gpu.memory, question.overhead_bytes
    if memory >= 2**47:
        raise ConfigError(f"memory_limit is {format_bytes(memory)}: allowed is less than 128TiB")
    if overhead >= memory:
        raise ConfigError(
            f"memory_limit is {format_bytes(memory)}, of which memory_overhead takes {format_bytes(overhead)}: nothing "
            "is left for tensors; raise memory_limit"
        )
    key = "lengths" if question.lengths else "sequence_length"
    answer = int(question.cfg.max_generated_tokens) if trains_on_rollouts(question.cfg) else 0
    tokens, most = question.length + answer, question.most_tokens
    if tokens > most:
        plus = f" and max_generated_tokens {answer}" * bool(answer)
        raise ConfigError(
            f"{key}: samples of {question.length} tokens{plus}, but the model takes at most {most} (its max_seq_len)"
        )
    if tokens < 2:
        raise ConfigError(f"{key} is {tokens}: a sample needs at least 2 tokens, one of which is predicted")


def changed(cfg: DictConfig, overrides: Overrides) -> DictConfig:
    """The config as torchtune's parser would make it of these."""
    copy = cfg.copy()
    for removed in (each[1:] for each in overrides if each.startswith("~")):
        section, _, key = removed.rpartition(".")
        (OmegaConf.select(copy, section) if section else copy).pop(key, None)
    merged = OmegaConf.merge(copy, OmegaConf.from_dotlist([each for each in overrides if not each.startswith("~")]))
    assert isinstance(merged, DictConfig)
    return merged


def _lengths_of_dataset(cfg: DictConfig) -> list[int]:
    """Lengths of the config's own dataset, tokenized: of so many samples, drawn at random."""
    dataset: Any = build_dataset(cfg, components.build("tokenizer", cfg))[0]
    drawn = random.Random(0).sample(range(len(dataset)), min(len(dataset), LENGTHS))
    kind = PAIR if trains_on_pairs(cfg) else TEXT
    return [max(kind.lengths_of(dataset[index])) for index in drawn]


def _skewed(median: int, longest: int) -> list[int]:
    """Lengths as of instructions: log-normal, one in a thousand as long as the longest."""
    if not 1 <= median <= longest:
        raise ValueError("the median has to be at least 1 and at most the longest")
    drawn, spread = random.Random(0), math.log(longest / median) / 3.09
    return [min(longest, max(1, round(median * math.exp(spread * drawn.gauss(0, 1))))) for _ in range(LENGTHS)]
