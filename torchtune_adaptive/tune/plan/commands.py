"""The command that trains what a prediction was asked about."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from omegaconf import DictConfig

from torchtune_adaptive.prediction.cards import card_named
from torchtune_adaptive.tune.config.adaptive import read_adaptive
from torchtune_adaptive.tune.config.rules import value_at
from torchtune_adaptive.tune.config.settings import on_gpu
from torchtune_adaptive.tune.parts.data import is_packed
from torchtune_adaptive.tune.plan.answers import Answers
from torchtune_adaptive.tune.plan.overrides import Overrides, joined
from torchtune_adaptive.tune.plan.question import PlanSettings
from torchtune_adaptive.tune.plan.settings import RANKS_OF_A_MACHINE
from torchtune_adaptive.tune.trace.recipes import training_of, trains_with_ppo


@dataclass(frozen=True)
class Wanted:
    """What a run is to be like."""

    rows: int
    tokens: int
    """Tokens of a row, as they were asked about."""
    budget_fits: bool = False
    """Whether it may keep the token budget of its config."""

    @classmethod
    def of(cls, found: Answers, at: int) -> Wanted:
        """The answer for one of the lengths."""
        fits = all(found.budget_fits(stage, at) for stage in found.by_stage)
        return cls(found.batch_size(at), found.answers[at].tokens, fits)


def command(cfg: DictConfig, plan: PlanSettings, config_name: str, wanted: Wanted, given: Sequence[str] = ()) -> str:
    """What trains so, or finds as much by itself; as the question was `given`."""
    words = joined(_for_a_run(cfg, plan, given), _sizes(cfg, plan, wanted))
    parts = [_launcher(plan.ranks), training_of(cfg).name, f"--config {config_name}", shlex.join(words)]
    return f"{_environment(cfg, plan, os.environ)}tune run {' '.join(parts)}".rstrip()


def notes_on_samples(cfg: DictConfig, rows: int) -> list[str]:
    """How many samples a step has with the printed batch size, where that is another number than the config's."""
    by_tokens = read_adaptive(cfg.get("adaptive")).token_budget is not None
    microbatches, configured = int(cfg.get("gradient_accumulation_steps") or 1), int(cfg.batch_size)
    if not rows or by_tokens or trains_with_ppo(cfg) or rows == configured:
        return []
    return [
        f"batch_size={rows} makes {rows * microbatches} samples a step of each rank, where the config has "
        f"{configured * microbatches}: use_maximum_batch_size=True finds as many rows and keeps the samples"
    ]


def _launcher(ranks: int) -> str:
    machines, left = divmod(ranks, RANKS_OF_A_MACHINE)
    if machines <= 1 or left:
        return f"--nproc_per_node {ranks}"
    return f"--nnodes {machines} --nproc_per_node {RANKS_OF_A_MACHINE} --rdzv_backend c10d --rdzv_endpoint NODE0:29400"


def _sizes(cfg: DictConfig, plan: PlanSettings, wanted: Wanted) -> Overrides:
    """The batch size, or what measures it for each stage, or in tokens; and the length that was asked about."""
    return (*_size(cfg, wanted), *_length(cfg, plan, wanted.tokens))


def _size(cfg: DictConfig, wanted: Wanted) -> Overrides:
    budget = read_adaptive(cfg.get("adaptive")).token_budget
    if budget is not None:
        return () if wanted.budget_fits else ("adaptive.token_budget=auto",)
    if trains_with_ppo(cfg):
        return ("use_maximum_batch_size=True",)
    searched = bool(cfg.get("use_maximum_batch_size"))
    return (f"batch_size={wanted.rows}", *["use_maximum_batch_size=False"] * searched)


def _length(cfg: DictConfig, plan: PlanSettings, tokens: int) -> Overrides:
    """No row longer than that; where the run measures, the length that it measures, which cuts nothing."""
    if plan.sequence_length is None:
        return ()
    measures = trains_with_ppo(cfg) or read_adaptive(cfg.get("adaptive")).token_budget is not None
    if measures and not is_packed(cfg):
        return (f"adaptive.sequence_length={tokens}",)
    known = value_at(cfg, "tokenizer.max_seq_len") == tokens
    return () if known else (f"tokenizer.max_seq_len={tokens}",)


def _for_a_run(cfg: DictConfig, plan: PlanSettings, given: Sequence[str]) -> Overrides:
    """The given overrides that a run takes too, and the limit that was asked about."""
    asked = {each.name for each in fields(plan)}
    return (*(word for word in given if word.partition("=")[0] not in asked), *_limit(cfg, plan))


def _limit(cfg: DictConfig, plan: PlanSettings) -> Overrides:
    """A GPU has its limit without being told, unless the config says less; a CPU has none."""
    limit, card = plan.memory_limit, card_named(plan.memory_limit)
    if limit is None:
        return ()
    if not on_gpu(cfg):
        return (f"adaptive.memory_limit={f'{card.gib:g}GiB' if card else limit}",)
    said = read_adaptive(cfg.get("adaptive")).memory_limit is not None
    return ("adaptive.memory_limit=null",) if said else ()


def _environment(cfg: DictConfig, plan: PlanSettings, environment: Mapping[str, str]) -> str:
    """What sets the caching allocator as it was asked about."""
    if plan.expandable_segments is None or not on_gpu(cfg):
        return ""
    name = "PYTORCH_ALLOC_CONF" if environment.get("PYTORCH_ALLOC_CONF") else "PYTORCH_CUDA_ALLOC_CONF"
    others = re.sub(r"expandable_segments:\w*,?", "", environment.get(name, "").replace(" ", "")).strip(",")
    pairs = [*([others] if others else []), f"expandable_segments:{plan.expandable_segments}"]
    return f"{name}={shlex.quote(','.join(pairs))} "
