"""The keys of `adaptive_plan`, beside those of the recipe that it predicts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.memory_sizes import MemorySize, format_bytes, parse_amount
from torchtune_adaptive.prediction.capacity import Budget
from torchtune_adaptive.prediction.cards import CARDS, ONE_CORE, Card, card_named, limit_bytes
from torchtune_adaptive.report.pictures import check_drawable
from torchtune_adaptive.tune.config import rules
from torchtune_adaptive.tune.config.adaptive import AdaptiveConfig
from torchtune_adaptive.tune.plan.question import TOKENS, PlanSettings
from torchtune_adaptive.tune.rl.settings import PPO_KEYS
from torchtune_adaptive.tune.trace.which_recipe import trains_with_ppo

PLAN_KEYS = (*PPO_KEYS, *rules.keys_of(PlanSettings))
"""Keys that a question may have beside those of finetuning: its own, and PPO's."""
ASSUMED_TOKENS = 4096
"""Length of a row where nothing says how long rows are."""
RANKS_OF_A_MACHINE = 8
NETWORK = 50e9
"""Bytes a second between machines, for each rank: 400 Gbit."""
ONE_PROCESS_OVERHEAD = "1GiB"
MANY_RANKS_OVERHEAD = "3GiB"
_NOTHING = re.compile(r"0+(\.0+)?\s*([KMGT]i?)?B", re.IGNORECASE)


def read_plan_settings(cfg: DictConfig) -> PlanSettings:
    settings = rules.read(PlanSettings, cfg)
    if settings.advise and len(settings.several_ranks) > 1:
        raise ConfigError(
            f"advise is True and world_size is {[*settings.several_ranks]}, but settings are compared for one number "
            "of ranks: set world_size to one, or remove advise"
        )
    if settings.picture is not None:
        if len(settings.several_ranks) > 1:
            raise ConfigError("picture draws the answer for one number of ranks: set world_size to one, or remove it")
        check_drawable(Path(settings.picture), "picture")
    if settings.link_bandwidth is not None:
        parse_amount(settings.link_bandwidth, "link_bandwidth")
    return settings


def check_advice(cfg: DictConfig, settings: PlanSettings) -> None:
    if settings.advise and trains_with_ppo(cfg):
        raise ConfigError("advise does not support PPO; remove it")


@dataclass(frozen=True)
class Lengths:
    tokens: tuple[int, ...]
    """Tokens of a row: one length or several."""
    key: str
    """What says so."""

    @classmethod
    def of(cls, adaptive: AdaptiveConfig) -> Lengths | None:
        """The length that a run measures, where its config says one."""
        key, tokens = "adaptive.sequence_length", adaptive.sequence_length
        return None if tokens is None else cls((tokens,), key)


def lengths(cfg: DictConfig, adaptive: AdaptiveConfig, plan: PlanSettings) -> Lengths | None:
    """Lengths that are asked about; None where nothing says how long rows are."""
    tokenizer = cfg.get("tokenizer")
    for key, given in (
        ("sequence_length", plan.sequence_length),
        ("adaptive.sequence_length", adaptive.sequence_length),
        ("tokenizer.max_seq_len", tokenizer.get("max_seq_len") if isinstance(tokenizer, DictConfig) else None),
    ):
        if isinstance(given, tuple):
            return Lengths(given, key)
        if given is not None:
            return Lengths((_tokens(given, key),), key)
    return None


def check_row_lengths(given: Lengths | None, allowed: int) -> None:
    """Refuses rows that are longer than the model takes."""
    if given is not None and max(given.tokens) > allowed:
        raise ConfigError(
            f"{given.key} is {max(given.tokens)}, but the model takes at most {allowed} (its max_seq_len): lower it"
        )


def _tokens(given: Any, key: str) -> int:
    if not TOKENS.accepts(given):
        raise ConfigError(f"{key} is {given!r}: allowed is {TOKENS.allowed}")
    return int(given)


def budget(plan: PlanSettings, adaptive: AdaptiveConfig, *, on_gpu: bool) -> Budget:
    """What the rank has that has least."""
    if plan.memory_limit is not None:
        key, have = "memory_limit", limit_bytes(plan.memory_limit, "memory_limit")
    else:
        key, have = "adaptive.memory_limit", _least_of_ranks(adaptive.memory_limit, plan.ranks)
    taken = _overhead_bytes(plan, on_gpu=on_gpu)
    if taken >= have:
        raise ConfigError(
            f"{key} is {format_bytes(have)}, but memory_overhead is {format_bytes(taken)}: nothing is left for "
            "tensors; raise the limit"
        )
    return Budget(have, taken, on_gpu and expandable_segments(plan, os.environ))


def card_of(plan: PlanSettings, *, on_gpu: bool) -> Card:
    """The card whose speed counts: an A100 where only an amount of memory is given."""
    if not on_gpu:
        return ONE_CORE
    return card_named(plan.memory_limit) or CARDS["a100"]


def link_bytes_per_s(plan: PlanSettings, card: Card) -> float:
    if plan.link_bandwidth is not None:
        return parse_amount(plan.link_bandwidth, "link_bandwidth")
    return card.link_bytes_per_s if plan.ranks <= RANKS_OF_A_MACHINE else min(NETWORK, card.link_bytes_per_s)


def _least_of_ranks(limits: Sequence[MemorySize] | None, world_size: int) -> int:
    """`adaptive.memory_limit`, of the rank that has least where it is a list with one for each."""
    key = "adaptive.memory_limit"
    if limits is None:
        raise ConfigError(
            "memory_limit is null: set it to the memory of a rank, as an amount (24GiB, 80GB) or a card (h100, "
            "a100-40, 4090)"
        )
    if len(limits) not in (1, world_size):
        raise ConfigError(
            f"{key} has {len(limits)} amounts and world_size is {world_size}: give one per rank, or set memory_limit"
        )
    return min(_known_bytes(each, key) for each in limits)


def _known_bytes(size: MemorySize, key: str) -> int:
    if size.is_fraction:
        amount = "memory_limit, an amount (24GiB) or a card (h100)"
        raise ConfigError(f"{key} is {size.amount:g}: a fraction needs a device; give {amount}")
    return int(size.amount)


def expandable_segments(plan: PlanSettings, environment: Mapping[str, str]) -> bool:
    """Whether the caching allocator has segments that grow."""
    if plan.expandable_segments is not None:
        return plan.expandable_segments
    return dict(allocator_settings(environment)).get("expandable_segments", "false").lower() == "true"


def allocator_settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """What PYTORCH_CUDA_ALLOC_CONF, or its newer name, says: pairs of key and value."""
    given = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    pairs = (part.partition(":") for part in given.replace(" ", "").split(",") if part)
    return [(key, value) for key, _, value in pairs]


def _overhead_bytes(plan: PlanSettings, *, on_gpu: bool) -> int:
    overhead = plan.memory_overhead
    if overhead is None:
        if not on_gpu:
            return 0
        overhead = MANY_RANKS_OVERHEAD if plan.ranks > 1 else ONE_PROCESS_OVERHEAD
    return parse_amount(overhead, "memory_overhead") if overhead and not _NOTHING.fullmatch(str(overhead)) else 0
