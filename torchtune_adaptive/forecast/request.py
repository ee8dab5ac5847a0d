"""A request to `adaptive_plan`: a config and its recipe, the GPU, the number of ranks, and the lengths of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import components, keys
from torchtune_adaptive.config.checks import SECTIONS
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import COUNT, MOST_TOKENS, NULL, TEXT, Rule, Settings, one_of, setting, value_at
from torchtune_adaptive.config.registry import FULL, FULL_DPO, GRPO, GRPO_LORA, LORA, LORA_DPO, PPO, Recipe
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import parse_amount
from torchtune_adaptive.rehearse.gpus import GPUS, Gpu
from torchtune_adaptive.rehearse.start import overhead_of
from torchtune_adaptive.rl.settings import GRPO_KEYS, POLICY_SECTION, PPO_KEYS
from torchtune_adaptive.tune.checked_dataset import max_seq_len_of

Overrides = tuple[str, ...]
"""Changes of a config, in the form of command-line arguments."""
STEPS = 2
"""Steps to rehearse: at least two, because the optimizer state is not yet in memory in the first backward."""
DEFAULT_TOKENS = 4096


def _one_or_several(most: int) -> Rule:
    return keys.count_up_to(most) | keys.counts_up_to(most)


def _are_prices(value: object) -> bool:
    return isinstance(value, dict) and all(key in GPUS and keys.NUMBER.accepts(each) for key, each in value.items())


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The keys that `adaptive_plan` accepts in addition to those of the recipe."""

    world_size: int | tuple[int, ...] = setting(_one_or_several(65_536), 1)
    """number of ranks, or several numbers to compare, such as `[1,2,4,8]`. Only one rank is rehearsed, so any number
    works"""
    memory_limit: str | float | None = setting(TEXT | keys.NUMBER | NULL, None)
    """memory of a rank: an amount (`24GiB`, `80GB`) or a card (`h100`, `a100-40`, `4090`), or several to compare, such
    as `4090,h100`. null: `adaptive.memory_limit`, or its smallest entry if it is a list"""
    price: Mapping[str, float] | None = setting(Rule(_are_prices, "a price per card: price.h100=2.49") | NULL, None)
    """price of a card per hour, such as `price.h100=2.49`; adds the cost of a million tokens to the table"""
    memory_overhead: str | int | None = setting(TEXT | one_of(0) | NULL, None)
    """memory of a rank that tensors cannot use (CUDA context, NCCL, libraries). null: `3GiB`, or `1GiB` for one
    process"""
    sequence_length: int | tuple[int, ...] | None = setting(_one_or_several(MOST_TOKENS) | NULL, None)
    """tokens of a row, or several lengths to compare, such as `[2048,8192]`. null: `adaptive.sequence_length`, else
    `tokenizer.max_seq_len`, else the smaller of 4096 and the model's maximum"""
    steps: int = setting(COUNT, STEPS)
    """steps to rehearse after the search"""
    format: str = setting(one_of("table", "json"), "table")
    """output format. `json`: a list with an object for each setting. Each has the keys of a row of `tune-adaptive
    rehearse --gpu 4090,h100`, and more"""
    advise: bool | None = setting(keys.BOOL | NULL, None)
    """rehearse changes of the config that save memory. null: only if it does not fit. `True`: always. `False`: never"""

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """The numbers of ranks, without duplicates."""
        return (self.world_size,) if isinstance(self.world_size, int) else tuple(dict.fromkeys(self.world_size))


PLAN_KEYS = (*PPO_KEYS, *GRPO_KEYS, *keys.keys_of(PlanSettings))
"""Keys that `adaptive_plan` accepts in addition to those of finetuning."""


def recipe_of(cfg: DictConfig) -> Recipe:
    """Return the recipe that runs this config."""
    if POLICY_SECTION in cfg:
        return PPO
    full, lora = (FULL, LORA)
    if "grpo_samples" in cfg:
        full, lora = (GRPO, GRPO_LORA)
    elif cfg.get("ref_checkpointer") is not None or "rlhf" in str(value_at(cfg, "loss._component_")):
        full, lora = (FULL_DPO, LORA_DPO)
    return lora if "lora_attn_modules" in components.require(cfg, "model") else full


@dataclass(frozen=True)
class PlanRequest:
    """A config, the settings of `adaptive_plan`, and the overrides of the command line."""

    cfg: DictConfig
    plan: PlanSettings
    config_name: str
    overrides: Sequence[str] = ()
    changes: Overrides = ()
    """The overrides that distinguish an alternative from the request of the command line."""

    @property
    def ranks(self) -> int:
        """The number of ranks; if the request has several, the first."""
        return self.plan.rank_counts[0]

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe to rehearse."""
        return recipe_of(self.cfg)

    @cached_property
    def settings(self) -> Settings:
        """The settings that the recipe reads from the config; raises the recipe's ConfigError."""
        return self.recipe.read(self.cfg)[0]

    def variants(self) -> Iterator[PlanRequest]:
        """Yield a request for each number of ranks, length and GPU."""
        lengths, memory = self.plan.sequence_length, self.plan.memory_limit
        every_length = lengths if isinstance(lengths, tuple) else (lengths,)
        gpus = memory.split(",") if isinstance(memory, str) else (memory,)
        for ranks, length, gpu in product(self.plan.rank_counts, every_length, gpus):
            plan = replace(self.plan, world_size=ranks, sequence_length=length, memory_limit=gpu)
            yield replace(self, plan=plan)

    def with_ranks(self, ranks: int) -> PlanRequest:
        """Return this request for another number of ranks."""
        return replace(self, plan=replace(self.plan, world_size=ranks), changes=(f"world_size={ranks}",))

    def with_overrides(self, overrides: Overrides) -> PlanRequest:
        """Return this request with more overrides."""
        return replace(self, cfg=override(self.cfg, overrides), overrides=[*self.overrides, *overrides],
                       changes=overrides)  # fmt: skip

    @property
    def length(self) -> int:
        """The number of tokens of a row; in reinforcement learning, of a prompt."""
        requested: Any = self.plan.sequence_length or value_at(self.cfg, "adaptive.sequence_length")
        return int(requested or value_at(self.cfg, "tokenizer.max_seq_len") or min(DEFAULT_TOKENS, self.max_seq_len))

    @cached_property
    def max_seq_len(self) -> int:
        """The number of tokens of the longest sequence that the model accepts."""
        with torch.device("meta"):
            model = components.build(POLICY_SECTION if POLICY_SECTION in self.cfg else "model", self.cfg)
        return max_seq_len_of([model]) or MOST_TOKENS

    @property
    def batch_size(self) -> int | None:
        """The batch size, if the command line sets one; None: search for the largest."""
        is_set = any(word.startswith("batch_size=") for word in self.overrides)
        return int(self.cfg.batch_size) if is_set and not self.cfg.get("use_maximum_batch_size") else None

    @property
    def gpu(self) -> Gpu:
        """The GPU to simulate, with the smallest memory limit of any rank."""
        memory = self.plan.memory_limit
        if memory is None:
            limits = self.settings.adaptive.memory_limit
            if limits is None or any(limit.is_fraction for limit in limits):
                gpus = ", ".join(GPUS)
                raise ConfigError(f"memory_limit is null: set it to an amount (24GiB, 80GB) or a GPU ({gpus})")
            return GPUS["h100"]._replace(memory=min(int(limit.amount) for limit in limits))
        name = str(memory).strip().lower()
        if name in GPUS:
            return GPUS[name]
        try:
            return GPUS["h100"]._replace(memory=parse_amount(memory, "memory_limit"))
        except ConfigError as error:
            raise ConfigError(f"{error}; or a GPU: {', '.join(GPUS)}") from error

    @property
    def overhead_bytes(self) -> int:
        """The memory of a rank that tensors cannot use."""
        overhead = self.plan.memory_overhead
        if overhead is None:
            return overhead_of(self.ranks)
        return 0 if overhead == 0 else parse_amount(overhead, "memory_overhead")


def read_request(cfg: DictConfig, config_name: str, overrides: Sequence[str]) -> PlanRequest:
    """Read the settings and check them. Raise a ConfigError if they are invalid, or if the recipe would reject them."""
    request = PlanRequest(cfg, keys.read(PlanSettings, cfg), config_name, overrides)
    sections = {str(key) for key in cfg if value_at(cfg, f"{key!s}.{COMPONENT}") is not None}
    if unknown := sorted(sections - {*SECTIONS, *PLAN_KEYS}):
        raise ConfigError(
            f"{', '.join(unknown)}: not a section of any recipe that adaptive_plan supports, so the forecast would be "
            f"wrong: use tune-adaptive rehearse --ranks {request.ranks} -- tune run RECIPE --config {config_name}"
        )
    if not str(cfg.get("device", "cuda")).startswith("cuda"):
        raise ConfigError(f"device is {cfg.device}, which adaptive_plan does not support: set device=cuda")
    request.settings  # noqa: B018
    for variant in request.variants():
        variant.gpu  # noqa: B018
    return request


def override(cfg: DictConfig, overrides: Overrides) -> DictConfig:
    """Return a copy of the config, to which the overrides are applied as by torchtune's parser."""
    copy = cfg.copy()
    for removed in (each[1:] for each in overrides if each.startswith("~")):
        section, _, key = removed.rpartition(".")
        (OmegaConf.select(copy, section) if section else copy).pop(key, None)
    merged = OmegaConf.merge(copy, OmegaConf.from_dotlist([each for each in overrides if not each.startswith("~")]))
    assert isinstance(merged, DictConfig)
    return merged
