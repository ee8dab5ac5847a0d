"""The microbatch limit of each stage: configured, or measured before the first iteration.

A token budget limits the length of prompt and answer. For generation, the length of the answer is not known yet, so
`max_generated_tokens` takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from torchtune_adaptive.data.loading import max_seq_len_of
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit, longest_row
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.probes import TrainingStep
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.engine.snapshot import restoring_state
from torchtune_adaptive.errors import ConfigError, Remedy
from torchtune_adaptive.lifecycle.console import log_rank_0
from torchtune_adaptive.loop.batch_size import (
    LONGEST_SAMPLE,
    SEARCH_SKIPPED,
    check_lengths,
    profile_lengths,
    remedies_for_long_samples,
    search_rows,
    worst_sample,
)
from torchtune_adaptive.loop.training_loop import TrainingLoop
from torchtune_adaptive.rl.rollouts import Rollout, worst_rollout
from torchtune_adaptive.rl.settings import REMEDIES_IN_PPO, PPOSettings
from torchtune_adaptive.rl.stages import GENERATE, RolloutStage


class LimitFinder:
    """Finds the limit of each stage, with all models and optimizers in memory."""

    def __init__(self, loop: TrainingLoop, stages: Mapping[str, RolloutStage], rl: PPOSettings) -> None:
        self._loop, self._stages, self._new_tokens = loop, stages, rl.max_generated_tokens
        self._settings, self._data, self._optimization = loop.run.settings, loop.data, loop.optimization
        self._most_tokens = most = max_seq_len_of(stage.model for stage in stages.values())
        if most is not None and most <= self._new_tokens:
            raise ConfigError(
                f"max_generated_tokens is {self._new_tokens}, but the models take at most {most} tokens (their "
                f"max_seq_len) for prompt and answer together: set it to {most - 1} or less"
            )

    def find(self, memory: MemorySource | None) -> Mapping[str, Limit]:
        """Collective: return the limits. Raise SampleTooLargeError for prompts that leave no room for an answer."""
        limits = self._limits(memory)
        self._check_prompts(min(longest_row(limit, LONGEST_SAMPLE) for limit in limits.values()))
        return limits

    def _limits(self, memory: MemorySource | None) -> Mapping[str, Limit]:
        budget, configured = self._settings.adaptive.token_budget, self._loop.stages.limits
        if isinstance(budget, int):
            log_rank_0(f"token budget · at most {budget} tokens, padding included, in a microbatch of each stage")
            return dict.fromkeys(configured, TokenLimit(budget))
        if budget is None and not self._settings.use_maximum_batch_size:
            return configured
        if memory is None:
            remedy = "" if budget is None else ", or adaptive.token_budget to a number"
            log_rank_0(f"{'token budget' if remedy else 'batch search'} · {SEARCH_SKIPPED}{remedy}")
            return configured
        with self._optimizer_state_in_memory(memory):
            return {stage: self._measure(memory, stage) for stage in configured}

    def _check_prompts(self, longest: int) -> None:
        """Collective: check that each prompt and an answer fit in `longest` tokens and in the models' max_seq_len."""
        new, most = self._new_tokens, self._most_tokens
        reason, remedy = "", remedies_for_long_samples(self._settings, REMEDIES_IN_PPO[Remedy.SHORTER_SAMPLES])
        if most is not None and most < longest:
            longest, reason = most, f", since the models take at most {most} tokens (their max_seq_len)"
            remedy = f"lower max_generated_tokens, or lower tokenizer.max_seq_len to {most - new}"
        if longest < LONGEST_SAMPLE:
            check_lengths(self._settings, self._data, max(0, longest - new), f" plus an answer{reason}; {remedy}")

    @contextmanager
    def _optimizer_state_in_memory(self, memory: MemorySource) -> Iterator[None]:
        """Collective: create the optimizer state, as in training, and restore weights and state at the end."""
        trained = [stage.model for stage in self._stages.values() if stage.trains is not None]
        with restoring_state(trained, self._optimization.optimizers):
            # Suspend the memory limit, so that an error comes from the search, with the size of the shortage.
            with memory.unlimited():
                allocate_gradients(trained)
                for optimizer in self._optimization.optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            yield

    def _measure(self, memory: MemorySource, stage: str) -> Limit:
        """Collective: return the measured limit of a stage: by length under a token budget, or else by rows."""
        step, rows = self._worst_step(memory, stage), self._stages[stage].samples
        try:
            if self._settings.adaptive.token_budget is not None:
                return profile_lengths(self._loop, step, memory, most_rows=rows).limit
            return RowLimit(search_rows(self._loop, step, memory, most_rows=rows, whole_step_rows=rows).rows)
        finally:
            self._optimization.optimizers[0].zero_grad(set_to_none=True)

    def _worst_step(self, memory: MemorySource, name: str) -> TrainingStep[Rollout]:
        """Collective: return the worst-case step of a stage. The last training stage also updates all models."""
        stages, new = self._stages, self._new_tokens
        *earlier, last = (stage for stage in stages.values() if stage.trains is not None)
        trained_before = [stage.model for stage in earlier]
        generates, updates = name == GENERATE, stages[name] is last

        # Suspend the memory limit, so that an error comes from the search, with the size of the shortage.
        with memory.unlimited():
            tokens = worst_sample(self._data, self._settings.adaptive.sequence_length)["tokens"]
            room = None if self._most_tokens is None else self._most_tokens - new
            rollout = worst_rollout(torch.as_tensor(tokens, dtype=torch.long)[:room], new)
            if updates:
                allocate_gradients(trained_before)

        def update(result: StepResult) -> None:
            self._optimization.update({str(stage.trains): result.target_tokens for stage in (*earlier, last)})
            allocate_gradients(trained_before)  # for the next probe

        norm = getattr(stages[name].model, "norm", None)
        return TrainingStep(
            runner=self._loop.stages[name],
            sample=rollout,
            cut=Rollout.with_shorter_prompt if generates else Rollout.shortened,
            # Up to `knee` tokens, a longer rollout has a longer answer; above, a longer prompt. Generation always
            # allocates the longest answer, so only the prompt grows.
            shortest=new + 1 if generates else 2,
            knee=new if generates else new + 1,
            update=update if updates else None,
            optimizers=(),  # _optimizer_state_in_memory restores their state
            boundaries={"layers": norm} if norm is not None else {},
        )


def allocate_gradients(models: Iterable[nn.Module]) -> None:
    """Set the gradients of all trained parameters to zeros."""
    for parameter in (parameter for model in models for parameter in model.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
