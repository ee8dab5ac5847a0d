"""The keys of `adaptive_plan`, beside those of the recipe that it predicts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.prediction.answer import Budget
from torchtune_adaptive.prediction.cards import limit_bytes
from torchtune_adaptive.sizes import format_bytes
from torchtune_adaptive.tune.start import sections
from torchtune_adaptive.tune.start.sections import BOOL, COUNT, NULL, NUMBER, TEXT, Rule, one_of, option

COUNTS = Rule(
    lambda v: isinstance(v, list) and bool(v) and all(COUNT.accepts(each) for each in v),
    "a list of whole numbers of at least 1",
)
ASSUMED_TOKENS = 4096
"""Of a row, where nothing says how long rows are."""
ONE_PROCESS_OVERHEAD = "1GiB"
MANY_RANKS_OVERHEAD = "3GiB"


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    world_size: int = option(COUNT, 1)
    """Ranks, on any number of machines."""
    memory_limit: str | float | None = option(TEXT | NUMBER | NULL, None)
    """What each rank has: an amount (24GiB, 80GB) or a card (h100); null: adaptive.memory_limit."""
    memory_overhead: str | None = option(TEXT | NULL, None)
    """Of it, what is not for tensors; null: 3GiB with NCCL, 1GiB in one process, nothing on a CPU."""
    sequence_length: int | tuple[int, ...] | None = option(COUNT | COUNTS | NULL, None)
    """Tokens of every row, or several lengths; null: adaptive.sequence_length, else tokenizer.max_seq_len, else
    4096 or the most that the model takes."""
    expandable_segments: bool | None = option(BOOL | NULL, None)
    """How CUDA's caching allocator will be set; null: as PYTORCH_CUDA_ALLOC_CONF sets it here, else False."""
    format: str = option(one_of("table", "csv", "json"), "table")
    picture: str | None = option(TEXT | NULL, None)
    """Where to draw the answer: a file of matplotlib's, say plan.png."""


def read_plan_settings(cfg: DictConfig) -> PlanSettings:
    return sections.read(PlanSettings, cfg)


def lengths(cfg: DictConfig, plan: PlanSettings) -> tuple[int, ...] | None:
    """Tokens of a row, one or several; None where nothing says them."""
    given = plan.sequence_length
    for key in ("adaptive.sequence_length", "tokenizer.max_seq_len"):
        if given is None:
            given = OmegaConf.select(cfg, key)
    if given is None:
        return None
    return given if isinstance(given, tuple) else (int(given),)


def budget(cfg: DictConfig, plan: PlanSettings, *, on_gpu: bool) -> Budget:
    """What one rank has."""
    key = "memory_limit"
    given = plan.memory_limit
    if given is None:
        key = "adaptive.memory_limit"
        given = OmegaConf.select(cfg, key)
    if given is None or not isinstance(given, str | int | float):
        raise ConfigError(
            f"memory_limit is {plan.memory_limit!r}, so there is nothing to fit into: "
            "give what a rank has, as an amount (24GiB, 80GB) or a card (h100, a100-40, 4090)"
        )
    have, taken = limit_bytes(given, key), _overhead_bytes(plan, on_gpu=on_gpu)
    if taken >= have:
        raise ConfigError(
            f"{key} is {format_bytes(have)}, but {format_bytes(taken)} are not for tensors (memory_overhead): "
            "nothing is left; give more"
        )
    return Budget(have, taken, on_gpu and expandable_segments(plan, os.environ))


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
        overhead = MANY_RANKS_OVERHEAD if plan.world_size > 1 else ONE_PROCESS_OVERHEAD
    return limit_bytes(overhead, "memory_overhead")
