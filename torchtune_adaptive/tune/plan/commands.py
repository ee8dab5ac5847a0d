"""The command that trains what a prediction was asked about."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.prediction.cards import card_named
from torchtune_adaptive.tune.plan.keys import PlanSettings
from torchtune_adaptive.tune.plan.overrides import Overrides, joined
from torchtune_adaptive.tune.plan.settings import RANKS_OF_A_MACHINE
from torchtune_adaptive.tune.start.catalogue import PPO
from torchtune_adaptive.tune.start.sections import read_adaptive
from torchtune_adaptive.tune.trace.recipes import is_lora, trains_on_pairs, trains_with_ppo


def command(
    cfg: DictConfig, plan: PlanSettings, config_name: str, *, rows: int, tokens: int, given: Sequence[str] = ()
) -> str:
    """What trains with so many rows of so many tokens, or finds as much by itself; as the question was `given`."""
    words = joined(_for_a_run(cfg, plan, given), _sizes(cfg, plan, rows, tokens))
    parts = [_launcher(plan.ranks), _recipe(cfg), f"--config {config_name}", shlex.join(words)]
    return f"{_environment(cfg, plan, os.environ)}tune run {' '.join(parts)}".rstrip()


def _recipe(cfg: DictConfig) -> str:
    if trains_with_ppo(cfg):
        return PPO
    way = "dpo" if trains_on_pairs(cfg) else "finetune"
    return f"adaptive_{'lora' if is_lora(cfg) else 'full'}_{way}_distributed"


def _launcher(ranks: int) -> str:
    machines, left = divmod(ranks, RANKS_OF_A_MACHINE)
    if machines <= 1 or left:
        return f"--nproc_per_node {ranks}"
    return f"--nnodes {machines} --nproc_per_node {RANKS_OF_A_MACHINE} --rdzv_backend c10d --rdzv_endpoint NODE0:29400"


def _sizes(cfg: DictConfig, plan: PlanSettings, rows: int, tokens: int) -> Overrides:
    """The batch size, or what measures it for each stage, or in tokens; and the length that was asked about."""
    if read_adaptive(cfg.get("adaptive")).token_budget is not None:
        sizes: Overrides = ("adaptive.token_budget=auto",)
    elif trains_with_ppo(cfg):
        sizes = ("use_maximum_batch_size=True",)
    else:
        searched = bool(cfg.get("use_maximum_batch_size"))
        sizes = (f"batch_size={rows}", *["use_maximum_batch_size=False"] * searched)
        if OmegaConf.select(cfg, "tokenizer.max_seq_len") == tokens:
            return sizes
    if plan.sequence_length is None:
        return sizes
    by_rows = sizes[0].startswith("batch_size")
    return (*sizes, f"{'tokenizer.max_seq_len' if by_rows else 'adaptive.sequence_length'}={tokens}")


def _for_a_run(cfg: DictConfig, plan: PlanSettings, given: Sequence[str]) -> Overrides:
    """The given overrides that a run takes too; a GPU has its limit without being told."""
    asked = {each.name for each in fields(plan)}
    kept = tuple(word for word in given if word.partition("=")[0] not in asked)
    limit, on_cpu = plan.memory_limit, str(cfg.get("device")).startswith("cpu")
    return (*kept, f"adaptive.memory_limit={limit}") if limit and on_cpu and not card_named(limit) else kept


def _environment(cfg: DictConfig, plan: PlanSettings, environment: Mapping[str, str]) -> str:
    """What sets the caching allocator as it was asked about."""
    if plan.expandable_segments is None or str(cfg.get("device")).startswith("cpu"):
        return ""
    name = "PYTORCH_ALLOC_CONF" if environment.get("PYTORCH_ALLOC_CONF") else "PYTORCH_CUDA_ALLOC_CONF"
    others = re.sub(r"expandable_segments:\w*,?", "", environment.get(name, "").replace(" ", "")).strip(",")
    pairs = [*([others] if others else []), f"expandable_segments:{plan.expandable_segments}"]
    return f"{name}={shlex.quote(','.join(pairs))} "
