"""What fits in each stage: what the config says or, measured before the first iteration, as many rows or tokens as fit.

Under a token budget a stage goes by the length of prompt and answer. Generating goes by that of the prompt and of all
that it may be answered with, since how long an answer gets is not known before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtune_adaptive.config.remedies import KEYS_IN_PPO
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit, longest_row
from torchtune_adaptive.engine.memory import MemorySource, leaving_no_trace
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out
from torchtune_adaptive.engine.probes import TrainingStep
from torchtune_adaptive.engine.profile import Profile
from torchtune_adaptive.engine.reports import StepResult
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError, Remedy, UnrecoverableError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.rl.course import RolloutParts
from torchtune_adaptive.rl.models import give_gradients
from torchtune_adaptive.rl.rollouts import REFERENCE_LOG_PROBS, SCORE, Rollout, worst_rollout
from torchtune_adaptive.rl.stages import GENERATE, STAGES, TRAIN_POLICY, configured_limits, samples_of_stage
from torchtune_adaptive.text import format_bytes, in_columns
from torchtune_adaptive.tune import fit
from torchtune_adaptive.tune.culprits import longest_taken
from torchtune_adaptive.tune.longest_sample import worst_sample
from torchtune_adaptive.tune.token_budget import LONGEST_SAMPLE, Admission, admission_of, ways_to_make_room

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
SHORTER = KEYS_IN_PPO[Remedy.SHORTER_SAMPLES]


@dataclass(frozen=True)
class StageLimits:
    """What a microbatch of each stage may be."""

    limits: Mapping[str, Limit]
    admission: Admission | None = None
    """Admission of prompts, where some may be too long for any microbatch, or for the models."""


def find_limits(parts: RolloutParts, memory: MemorySource | None) -> StageLimits:
    """Collective: the limit of each stage, measured where the config asks for that, and shown before training."""
    budget, configured = parts.settings.adaptive.token_budget, configured_limits(parts.ppo)
    if isinstance(budget, int):
        say(f"token budget · at most {budget} tokens, padding included, in a microbatch of each stage")
        return _admitting(parts, {stage: TokenLimit(budget) for stage in STAGES})
    if budget is None and not parts.settings.use_maximum_batch_size:
        return _by_rows(parts, configured)
    if memory is None:
        what, remedy = ("batch search", "") if budget is None else ("token budget", ", or the budget to a number")
        say(f"{what} · skipped: a CPU has no memory limit to search within; set adaptive.memory_limit{remedy}")
        return _by_rows(parts, configured)
    with _as_in_training(parts, memory):
        if budget is None:
            whole = {stage: samples_of_stage(stage, parts.ppo) for stage in STAGES}
            results = {
                stage: _measured(parts, memory, stage, partial(fit.rows, whole_step_rows=whole[stage]))
                for stage in STAGES
            }
            say(_table_of_rows(results))
            return _by_rows(parts, {stage: RowLimit(each.rows) for stage, each in results.items()}, searched=True)
        profiles = {stage: _measured(parts, memory, stage, fit.profile) for stage in STAGES}
    say(_table_of_lengths(profiles, parts.ppo.max_generated_tokens))
    return _admitting(parts, {stage: profile.limit for stage, profile in profiles.items()})


def _admitting(parts: RolloutParts, limits: Mapping[str, Limit]) -> StageLimits:
    """Collective: beside each prompt that is let in there is room for an answer, in every stage."""
    longest, new = min(longest_row(limit, LONGEST_SAMPLE) for limit in limits.values()), parts.ppo.max_generated_tokens
    ways, budget = ways_to_make_room(parts.settings, SHORTER), parts.settings.adaptive.token_budget
    if longest <= new:
        raise ConfigError(
            f"a microbatch has room for {longest} tokens (adaptive.token_budget: {budget}), but even a prompt of one "
            f"token and its answer may have {new + 1}: {', or '.join(ways)}"
        )
    fact, taken = " plus an answer", longest_taken(parts.models.everything)
    if taken is not None and taken < longest:
        longest, fact, ways = taken, _what_models_take(taken), _ways_to_shorten(taken - new)
    remedy = f"{fact}; {', '.join(ways)}, or set adaptive.oversize: truncate (cuts such prompts)"
    return StageLimits(limits, admission_of(parts.settings, parts.data, parts.data.kind, longest - new, remedy))


def _by_rows(parts: RolloutParts, limits: Mapping[str, Limit], *, searched: bool = False) -> StageLimits:
    """Collective: each prompt is looked at when it is read, and before training where a search has read them all."""
    taken = longest_taken(parts.models.everything)
    if taken is None:
        return StageLimits(limits)
    longest, data = taken - parts.ppo.max_generated_tokens, parts.data
    remedy = f"{_what_models_take(taken)}; {', or '.join(_ways_to_shorten(longest))}"
    if searched and data.max_seq_len is None and parts.settings.adaptive.sequence_length is None:
        strict = replace(parts.settings.adaptive, oversize="error")
        settings = replace(parts.settings, adaptive=strict)
        return StageLimits(limits, admission_of(settings, data, data.kind, longest, remedy))
    return StageLimits(limits, Admission(data.dataset, data.kind, longest, "error", remedy))


def _what_models_take(taken: int) -> str:
    return f" plus an answer, since the models take at most {taken} tokens (their max_seq_len)"


def _ways_to_shorten(longest: int) -> list[str]:
    return ["lower max_generated_tokens", f"lower tokenizer.max_seq_len to {longest}"]


@contextmanager
def _as_in_training(parts: RolloutParts, memory: MemorySource) -> Iterator[None]:
    """Collective: open, there is what there is in training whichever stage runs: optimizer state and rollouts."""
    trained = [parts.models.policy, parts.models.value]
    with leaving_no_trace(trained, parts.optimization.optimizers):
        # Not limited, so that it is the search that says by how much a rank has too little.
        with _explaining_what_does_not_fit(), memory.unlimited():
            for model in trained:
                give_gradients(model)
            for optimizer in parts.optimization.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            beside = _rollouts_of_an_iteration(parts)
        yield
        del beside


def _rollouts_of_an_iteration(parts: RolloutParts) -> list[Rollout]:
    """As many as lie on the host in training: this rank's, and those that it has gathered from all ranks. Where the
    host is what is measured, as on a CPU, they take room from every stage."""
    worst = _worst_rollout(parts)
    worst.kept |= {REFERENCE_LOG_PROBS: torch.zeros(len(worst.answer)), SCORE: torch.zeros(())}
    return [deepcopy(worst) for _ in range(parts.settings.batch_size * (1 + dist.get_world_size()))]


def _explaining_what_does_not_fit() -> AbstractContextManager[None]:
    return fatal_where_memory_runs_out(
        lambda _: UnrecoverableError(
            f"rank {dist.get_rank()} ran out of memory with four models, the gradients of two and the optimizer state: "
            "train on more ranks, with smaller models, or with an optimizer with less state"
        )
    )


def _measured(parts: RolloutParts, memory: MemorySource, stage: str, measure: Callable[..., Result]) -> Result:
    """Collective: what fits in a stage. To generate, parameters stay gathered if that leaves room for a row."""
    samples, name = samples_of_stage(stage, parts.ppo), stage.replace(" ", "_")

    def measured(folder: str) -> Result:
        step = _worst_step(parts, memory, stage)
        return measure(parts.trainer.run, step, memory, parts.data.kind, most_rows=samples, folder=folder)

    try:
        if stage == GENERATE and not parts.rollout_stages.gathering.stays:
            # what was found layer by layer is no answer for a run that has not tried without
            return measured(f"{name}_layer_by_layer")
        return measured(name)
    except OneRowDoesNotFitError:
        if stage != GENERATE or not parts.rollout_stages.gathering.can_end:
            raise
        parts.rollout_stages.go_layer_by_layer()
        return measured(f"{name}_layer_by_layer")
    finally:
        parts.optimization.optimizers[0].zero_grad(set_to_none=True)


def _worst_step(parts: RolloutParts, memory: MemorySource, stage: str) -> TrainingStep[Rollout]:
    """Collective: the longest prompt with the longest answer; the policy is trained beside the value's gradients."""
    runner, new = parts.stages[stage], parts.ppo.max_generated_tokens
    update: Callable[[StepResult], object] | None = None  # the value model is updated with the policy
    # Not limited: on a CPU even a prompt may be too much. It is the search that says by how much a rank has too little.
    with memory.unlimited():
        rollout = _worst_rollout(parts)
        if stage == TRAIN_POLICY:
            give_gradients(parts.models.value)
            update = partial(_update, parts)

    def cut(whole: Rollout, length: int) -> Rollout:
        with memory.unlimited():
            return whole.prompting(length) if stage == GENERATE else whole.answered(length)

    norm = getattr(runner.model, "norm", None)
    return TrainingStep(
        runner=runner,
        sample=rollout,
        cut=cut,
        # Up to the knee it is the answer that grows, behind it the prompt. When there is all of the former to be made,
        # there is nothing below the knee.
        shortest=new + 1 if stage == GENERATE else 2,
        knee=new if stage == GENERATE else new + 1,
        update=update,
        optimizers=(),  # as_in_training keeps and restores what there is
        boundaries={"layers": norm} if norm is not None else {},
    )


def _worst_rollout(parts: RolloutParts) -> Rollout:
    sample = worst_sample(parts.settings.config, parts.data, parts.data.kind, parts.settings.adaptive.sequence_length)
    prompt, new = torch.as_tensor(sample["tokens"], dtype=torch.long), parts.ppo.max_generated_tokens
    taken = longest_taken(parts.models.everything)
    # what is longer than the models take is refused, or cut, whatever it would need
    return worst_rollout(prompt if taken is None else prompt[: taken - new], new)


def _update(parts: RolloutParts, result: StepResult) -> None:
    """Collective: the update of both models; what the next probe finds is as it was before."""
    parts.optimization.update({"policy": result.target_tokens, "value": result.target_tokens})
    give_gradients(parts.models.value)


def _table_of_rows(results: Mapping[str, SearchResult]) -> str:
    """What every stage has come to, before training."""
    lines: list[Sequence[object]] = [("stage", "rows", "peak", "of budget")]
    for stage, result in results.items():
        peak = fit.peak_of(result) or 0
        lines.append((stage, result.rows, format_bytes(peak), f"{100 * peak / result.budget_bytes:5.0f} %"))
    return f"limit of each stage, with all four models in memory\n{in_columns(lines)}"


def _table_of_lengths(profiles: Mapping[str, Profile], new_tokens: int) -> str:
    """Limits by length: rows of the longest rollout there may be, and of shorter ones."""
    longest = max(point.length for profile in profiles.values() for point in profile.points)
    lengths = [longest, longest // 2, longest // 4]
    lines: list[Sequence[object]] = [
        ("stage", f"rows at {lengths[0]} tokens", *(f"at {length}" for length in lengths[1:]), "tokens at any length")
    ]
    for stage, profile in profiles.items():
        # to generate, a row has all new tokens
        rows = [profile.limit.rows_at(n) if stage != GENERATE or n > new_tokens else "-" for n in lengths]
        lines.append((stage, *rows, profile.constant_tokens))
    return f"limit of each stage, with all four models in memory\n{in_columns(lines)}"
