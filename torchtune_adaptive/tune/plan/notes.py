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

SEPARATE_STAGES = "stages are replayed separately: the cache of one may have to be flushed for the next"


def notes_on_question(plan: PlanSettings, given: Lengths | None, wanted: Sequence[int]) -> list[str]:
    notes = [] if given else [f"sequence_length is not set: assuming {wanted[0]} tokens"]
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1" and plan.ranks == 1:
        notes.append(
            f"this answer is for 1 rank, but the launcher starts {started}: set world_size={started} for those"
        )
    if str(plan.memory_limit).lower() in WITHOUT_FLASH_ATTENTION:
        notes.append(f"{plan.memory_limit} lacks bf16 and flash attention, which are assumed: it may need more memory")
    return notes


def notes_on_capacity(cfg: DictConfig, step: FakeStep, have: Budget, wanted: Sequence[int]) -> list[str]:
    """What the answer assumes and what it does not cover, said with it."""
    notes = _note_on_longer_samples(cfg, max(wanted))
    if any(tokens % step.tokens_multiple for tokens in wanted):
        notes.append(f"lengths are rounded up to a multiple of {step.tokens_multiple}, the chunks of the loss")
    if step.on_gpu:
        assumed = format_bytes(have.overhead_bytes)
        notes.append(f"CUDA context, NCCL and cuBLAS are not modelled: {assumed} is assumed (memory_overhead)")
        notes += _notes_on_allocator(have)
    if trains_on_pairs(cfg):
        notes += _notes_on_stages(cfg, step)
    if trains_with_ppo(cfg):
        notes += _notes_on_rollouts(cfg, step)
    if not step.rows.padded:
        notes.append("adaptive.token_budget: rows are samples packed without padding; the limit is their tokens")
    if step.settings.fsdp_cpu_offload:
        host = format_bytes(step.host_bytes)
        notes.append(
            f"fsdp_cpu_offload: each rank keeps {host} of weights, gradients and optimizer state in host memory"
        )
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
    return [f"samples longer than {longest} tokens need more; tokenizer.max_seq_len, which cuts them, is {said}"]


def _notes_on_stages(cfg: DictConfig, step: FakeStep) -> list[str]:
    notes = [
        "a row is a pair whose answers have that many tokens each; batch_size applies to both stages, "
        "use_maximum_batch_size finds a size for each"
    ]
    if not is_lora(cfg) and not keeps_reference(cfg):
        notes.append("adaptive.precompute_reference: the policy is trained without the reference model in memory")
    if step.on_gpu:
        notes.append(SEPARATE_STAGES)
    return notes


def _notes_on_rollouts(cfg: DictConfig, step: FakeStep) -> list[str]:
    rows = "rows: as many as a rank has in a stage (batch_size, ppo_batch_size) or as fit"
    if read_adaptive(cfg.get("adaptive")).token_budget is None:
        notes = [f"{rows}, rounded down; use_maximum_batch_size finds these for each stage"]
    else:
        notes = [f"{rows}; under adaptive.token_budget, more fit if they turn out shorter than the longest"]
    if step.on_gpu:
        notes.append(SEPARATE_STAGES)
    return notes


def _notes_on_allocator(have: Budget) -> list[str]:
    ignored = [f"{key}:{value}" for key, value in allocator_settings(os.environ) if key != "expandable_segments"]
    notes = [f"PYTORCH_CUDA_ALLOC_CONF: {','.join(ignored)} is not modelled"] if ignored else []
    return [*notes, f"the caching allocator is replayed with expandable_segments:{have.expandable_segments}"]
