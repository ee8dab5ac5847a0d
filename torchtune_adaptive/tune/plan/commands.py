"""The command that trains what a prediction was asked about."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from omegaconf import DictConfig

from torchtune_adaptive.prediction.cards import card_named
from torchtune_adaptive.prediction.outcome import Outcome
from torchtune_adaptive.tune.config.adaptive import read_adaptive
from torchtune_adaptive.tune.config.rules import value_at
from torchtune_adaptive.tune.config.settings import on_gpu
from torchtune_adaptive.tune.parts.data import is_packed
from torchtune_adaptive.tune.plan.capacities import Capacities
from torchtune_adaptive.tune.plan.overrides import Overrides, changed, merged
from torchtune_adaptive.tune.plan.question import Question
from torchtune_adaptive.tune.plan.settings import RANKS_OF_A_MACHINE
from torchtune_adaptive.tune.trace.which_recipe import training_of, trains_with_ppo


@dataclass(frozen=True)
class Wanted:
    """What a run is to be like."""

    rows: int
    tokens: int
    """Tokens of a row, as they were asked about."""
    budget_fits: bool = False
    """Whether it may keep the token budget of its config."""

    @classmethod
    def of(cls, found: Capacities, at: int) -> Wanted:
        """The answer for one of the lengths."""
        fits = all(found.budget_fits(stage, at) for stage in found.by_stage)
        return cls(found.batch_size(at), found.capacities[at].tokens, fits)


def command(question: Question, wanted: Wanted) -> str:
    """What trains so, or finds as much by itself; with the words of the question."""
    words = merged(_for_a_run(question), _sizes(question, wanted))
    ranks, recipe = question.plan.ranks, training_of(question.cfg).name
    parts = [_launcher(ranks), recipe, f"--config {question.config_name}", shlex.join(words)]
    return f"{_environment(question, os.environ)}tune run {' '.join(parts)}".rstrip()


def command_for_length(question: Question, found: Capacities, at: int) -> str | None:
    """What trains with the answer for a length; None where nothing fits."""
    return command(question, Wanted.of(found, at)) if found.batch_size(at) else None


def advised_command(question: Question, best: Outcome) -> str:
    """What trains with a line of the advice, whole."""
    words = best.name.split()
    cfg, given = changed(question.cfg, tuple(words)), [*question.given, *words]
    advised = replace(question.on(best.ranks), cfg=cfg, given=given)
    return command(advised, Wanted(best.rows, best.tokens, budget_fits=True))


def notes_on_samples(cfg: DictConfig, rows: int) -> list[str]:
    """How many samples a step has with the printed batch size, where that is another number than the config's."""
    by_tokens = read_adaptive(cfg.get("adaptive")).token_budget is not None
    microbatches, configured = int(cfg.get("gradient_accumulation_steps") or 1), int(cfg.batch_size)
    if not rows or by_tokens or trains_with_ppo(cfg) or rows == configured:
        return []
    return [
        f"batch_size={rows} makes {rows * microbatches} samples a step on each rank, the config "
        f"{configured * microbatches}; use_maximum_batch_size=True finds as many rows and keeps the samples"
    ]


def _launcher(ranks: int) -> str:
    machines, left = divmod(ranks, RANKS_OF_A_MACHINE)
    if machines <= 1 or left:
        return f"--nproc_per_node {ranks}"
    return f"--nnodes {machines} --nproc_per_node {RANKS_OF_A_MACHINE} --rdzv_backend c10d --rdzv_endpoint NODE0:29400"


def _sizes(question: Question, wanted: Wanted) -> Overrides:
    """The batch size, or what measures it for each stage, or in tokens; and the length that was asked about."""
    return (*_size(question.cfg, wanted), *_length(question, wanted.tokens))


def _size(cfg: DictConfig, wanted: Wanted) -> Overrides:
    budget = read_adaptive(cfg.get("adaptive")).token_budget
    if budget is not None:
        return () if wanted.budget_fits else ("adaptive.token_budget=auto",)
    if trains_with_ppo(cfg):
        return ("use_maximum_batch_size=True",)
    searched = bool(cfg.get("use_maximum_batch_size"))
    return (f"batch_size={wanted.rows}", *["use_maximum_batch_size=False"] * searched)


def _length(question: Question, tokens: int) -> Overrides:
    """No row longer than that; where the run measures, the length that it measures, which cuts nothing."""
    cfg = question.cfg
    if question.plan.sequence_length is None:
        return ()
    measures = trains_with_ppo(cfg) or read_adaptive(cfg.get("adaptive")).token_budget is not None
    if measures and not is_packed(cfg):
        return (f"adaptive.sequence_length={tokens}",)
    known = value_at(cfg, "tokenizer.max_seq_len") == tokens
    return () if known else (f"tokenizer.max_seq_len={tokens}",)


def _for_a_run(question: Question) -> Overrides:
    """The given overrides that a run takes too, and the limit that was asked about."""
    asked = {each.name for each in fields(question.plan)}
    return (*(word for word in question.given if word.partition("=")[0] not in asked), *_limit(question))


def _limit(question: Question) -> Overrides:
    """A GPU has its limit without being told, unless the config says less; a CPU has none."""
    limit = question.plan.memory_limit
    if limit is None:
        return ()
    if not on_gpu(question.cfg):
        card = card_named(limit)
        return (f"adaptive.memory_limit={f'{card.gib:g}GiB' if card else limit}",)
    said = read_adaptive(question.cfg.get("adaptive")).memory_limit is not None
    return ("adaptive.memory_limit=null",) if said else ()


def _environment(question: Question, environment: Mapping[str, str]) -> str:
    """What sets the caching allocator as it was asked about."""
    asked = question.plan.expandable_segments
    if asked is None or not on_gpu(question.cfg):
        return ""
    name = "PYTORCH_ALLOC_CONF" if environment.get("PYTORCH_ALLOC_CONF") else "PYTORCH_CUDA_ALLOC_CONF"
    others = re.sub(r"expandable_segments:\w*,?", "", environment.get(name, "").replace(" ", "")).strip(",")
    pairs = [*([others] if others else []), f"expandable_segments:{asked}"]
    return f"{name}={shlex.quote(','.join(pairs))} "
