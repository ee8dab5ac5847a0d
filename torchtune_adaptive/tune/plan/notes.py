"""What is said with an answer: what it assumes, and what it does not cover."""

from __future__ import annotations

import os
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.memory_sizes import format_bytes
from torchtune_adaptive.prediction.capacity import Budget
from torchtune_adaptive.prediction.cards import WITHOUT_FLASH_ATTENTION
from torchtune_adaptive.tune.config.adaptive import read_adaptive
from torchtune_adaptive.tune.parts.data import is_packed
from torchtune_adaptive.tune.plan.question import PlanSettings
from torchtune_adaptive.tune.plan.settings import Lengths, allocator_settings
from torchtune_adaptive.tune.trace.fakes import FakeStep
from torchtune_adaptive.tune.trace.which_recipe import is_lora, keeps_reference, trains_on_pairs, trains_with_ppo


def notes_on_question(plan: PlanSettings, given: Lengths | None, wanted: Sequence[int]) -> list[str]:
    notes = [] if given else [f"no sequence_length is given: {wanted[0]} tokens are assumed"]
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1" and plan.ranks == 1:
        notes.append(f"this is for 1 rank, though the launcher starts {started}: give world_size={started} for those")
    if str(plan.memory_limit).lower() in WITHOUT_FLASH_ATTENTION:
        notes.append(f"{plan.memory_limit} has neither bf16 nor flash attention, which are assumed: it may need more")
    return notes


def notes_on_capacity(cfg: DictConfig, step: FakeStep, have: Budget, wanted: Sequence[int]) -> list[str]:
    """What the answer assumes and what it does not cover, said with it."""
    notes = _note_on_longer_samples(cfg, max(wanted))
    if any(tokens % step.tokens_multiple for tokens in wanted):
        notes.append(f"each length is predicted as the next multiple of {step.tokens_multiple}, the chunks of the loss")
    if step.on_gpu:
        assumed = format_bytes(have.overhead_bytes)
        notes.append(f"context, NCCL, cuBLAS are not modelled: {assumed} are assumed for them (memory_overhead)")
        notes += _notes_on_allocator(have)
    if trains_on_pairs(cfg):
        notes += _notes_on_stages(cfg, step)
    if trains_with_ppo(cfg):
        notes += _notes_on_rollouts(cfg, step)
    if not step.rows.padded:
        notes.append("adaptive.token_budget: rows stand for samples one after another; what fits is their tokens")
    if step.settings.fsdp_cpu_offload:
        host = format_bytes(step.host_bytes)
        notes.append(f"fsdp_cpu_offload: each rank keeps {host} of weights, gradients and optimizer state on its host")
    if is_packed(cfg):
        notes.append("the block masks of packed rows are not counted (some MiB)")
    if step.on_gpu and step.settings.dtype == "fp32":
        notes.append("dtype fp32: norms are counted unfused, an upper bound")
    return notes


def _note_on_longer_samples(cfg: DictConfig, longest: int) -> list[str]:
    """Where nothing cuts samples down to the longest that was asked about."""
    cut_at = OmegaConf.select(cfg, "tokenizer.max_seq_len")
    by_tokens = read_adaptive(cfg.get("adaptive")).token_budget is not None
    if by_tokens or is_packed(cfg) or trains_with_ppo(cfg) or (cut_at is not None and cut_at <= longest):
        return []
    said = "not set" if cut_at is None else cut_at
    return [f"samples of more than {longest} tokens need more, and tokenizer.max_seq_len, which cuts them, is {said}"]


def _notes_on_stages(cfg: DictConfig, step: FakeStep) -> list[str]:
    notes = [
        "rows are pairs, both answers of so many tokens; batch_size is for both stages, and use_maximum_batch_size "
        "finds each its own"
    ]
    if not is_lora(cfg) and not keeps_reference(cfg):
        notes.append("adaptive.precompute_reference: the policy is trained without the model of the reference")
    if step.on_gpu:
        notes.append("stages are replayed one by one: what one leaves cached may have to be flushed for the other")
    return notes


def _notes_on_rollouts(cfg: DictConfig, step: FakeStep) -> list[str]:
    rows = "rows: the most that a rank has in a stage (batch_size, ppo_batch_size) or that fit"
    if read_adaptive(cfg.get("adaptive")).token_budget is None:
        notes = [f"{rows}, rounded down; use_maximum_batch_size finds as many for each"]
    else:
        notes = [f"{rows}; adaptive.token_budget: so many of the longest, and more of those that turn out shorter"]
    if step.on_gpu:
        notes.append("stages are replayed one by one: what one leaves cached may have to be flushed for the next")
    return notes


def _notes_on_allocator(have: Budget) -> list[str]:
    ignored = [f"{key}:{value}" for key, value in allocator_settings(os.environ) if key != "expandable_segments"]
    notes = [f"PYTORCH_CUDA_ALLOC_CONF: {','.join(ignored)} is not modelled"] if ignored else []
    return [*notes, f"the caching allocator is replayed with expandable_segments:{have.expandable_segments}"]
