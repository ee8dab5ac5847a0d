"""Before the first iteration: what fits in each stage, and how many iterations and epochs of prompts there will be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError, UnrecoverableError
from torchtune_adaptive.limits.limit import Limit, RowLimit
from torchtune_adaptive.memory.device import MemorySource, is_oom
from torchtune_adaptive.memory.snapshot import leaving_no_trace
from torchtune_adaptive.record.events import Event
from torchtune_adaptive.schedules.growth import EpochSizes
from torchtune_adaptive.search.probe import TrainingStep
from torchtune_adaptive.sizes import format_bytes
from torchtune_adaptive.step.reports import StepResult
from torchtune_adaptive.tune.parts.checkpoints.progress import Progress
from torchtune_adaptive.tune.parts.data import Data
from torchtune_adaptive.tune.parts.optimization.optimizer import Optimization
from torchtune_adaptive.tune.rl.models import Models, give_gradients
from torchtune_adaptive.tune.rl.rollouts import Rollout, worst_rollout
from torchtune_adaptive.tune.rl.settings import PPOSettings
from torchtune_adaptive.tune.rl.stages import GENERATE, STAGES, TRAIN_POLICY, RolloutStages, most_rows
from torchtune_adaptive.tune.run.fitting import FitRequest, say, search_batch_size
from torchtune_adaptive.tune.run.journal import RunJournal
from torchtune_adaptive.tune.run.worst_case import worst_sample
from torchtune_adaptive.tune.start.sections import AdaptiveConfig
from torchtune_adaptive.tune.start.settings import Settings
from torchtune_adaptive.wording import count_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What the recipe has built that the course of a run depends on."""

    settings: Settings
    adaptive: AdaptiveConfig
    ppo: PPOSettings
    tokenizer: Any
    data: Data
    models: Models
    optimization: Optimization
    stages: RolloutStages
    journal: RunJournal


def plot_epochs(parts: RolloutParts, progress: Progress) -> tuple[tuple[EpochSizes, ...], Progress]:
    """Every epoch of the run: what is over, what is under way, and what `num_steps` leaves to be done."""
    ranks, size = dist.get_world_size(), parts.settings.batch_size
    if progress.step and progress.ranks != ranks:
        raise ConfigError(
            f"the checkpoint is that of {count_of(progress.ranks, 'rank')}, and there are {ranks} now: batch_size is "
            f"per rank, so an iteration would not have the samples that it had; go on with {progress.ranks}"
        )
    per_epoch, total = parts.data.loader.samples_per_rank // size, parts.ppo.iterations(ranks)
    if total == 0:
        raise ConfigError(
            f"num_steps is {parts.ppo.num_steps}, but one iteration takes {size * ranks} samples: batch_size {size} × "
            f"{ranks} ranks; raise num_steps, or lower batch_size"
        )
    left = total - progress.step
    epochs = list(progress.past)
    if progress.begun is not None:
        steps = min(per_epoch, progress.steps_in_epoch + left)
        epochs.append(replace(progress.begun, steps=steps))
        left -= steps - progress.steps_in_epoch
    while left > 0:
        steps = min(per_epoch, left)
        epochs.append(EpochSizes(len(epochs), size, 1, size, size, steps, lr_factor=1.0))
        left -= steps
    each = f"{size * ranks} answers, {count_of(parts.ppo.updates, 'update')}"
    say(f"{count_of(total, 'iteration')} of {each} each · {count_of(len(epochs), 'epoch')} of prompts")
    return tuple(epochs), replace(progress, total_epochs=len(epochs), ranks=ranks)


def find_limits(parts: RolloutParts, memory: MemorySource | None) -> Mapping[str, Limit]:
    """Collective: the most rows that fit in each stage, where the config asks for that; shown before training."""
    if not parts.settings.use_maximum_batch_size:
        return {}
    if memory is None:
        say("batch search · nothing to find on a CPU, which has no limit: set adaptive.memory_limit")
        return {}
    with _as_in_training(parts, memory):
        found = {stage: _search(parts, memory, stage) for stage in STAGES}
    say(_table(found))
    return {stage: RowLimit(event.after) for stage, event in found.items() if event.after}


@contextmanager
def _as_in_training(parts: RolloutParts, memory: MemorySource) -> Iterator[None]:
    """Collective: open, there is optimizer state of both models, as there is in training whichever stage runs."""
    trained = [parts.models.policy, parts.models.value]
    with leaving_no_trace(trained, parts.optimization.optimizers):
        # Not limited, so that it is the search that says by how much a rank has too little.
        with _explaining_what_does_not_fit(), memory.unlimited():
            for model in trained:
                give_gradients(model)
            for optimizer in parts.optimization.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        yield


@contextmanager
def _explaining_what_does_not_fit() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        raise UnrecoverableError(
            f"rank {dist.get_rank()} ran out of memory with four models, gradients of two and the optimizer's state: "
            "train on more ranks, with smaller models, or with an optimizer with less state"
        ) from error


def _search(parts: RolloutParts, memory: MemorySource, stage: str) -> Event:
    """Collective: the most rows of a stage. To generate, parameters stay gathered if that leaves room for a row."""
    found: list[Event] = []
    request = FitRequest(
        settings=parts.settings,
        adaptive=parts.adaptive,
        memory=memory,
        worst_step=partial(_worst_step, parts, memory, stage),
        data=parts.data,
        kind=parts.data.kind,
        found=found.append,
        stage=stage,
        folder=stage.replace(" ", "_"),
    )
    try:
        search_batch_size(request, memory, most_rows(stage, parts.ppo))
    except OneRowDoesNotFitError:
        if stage != GENERATE or not parts.stages.can_go_layer_by_layer:
            raise
        parts.stages.go_layer_by_layer()
        search_batch_size(request, memory, most_rows(stage, parts.ppo))
    finally:
        parts.optimization.optimizers[0].zero_grad(set_to_none=True)
    parts.journal.found(found[-1])
    return found[-1]


def _worst_step(parts: RolloutParts, memory: MemorySource, stage: str) -> TrainingStep[Rollout]:
    """Collective: the longest prompt with the longest answer; the policy is trained beside the value's gradients."""
    runner = parts.stages.runners[stage]
    update: Callable[[StepResult], object] = _do_nothing
    # Not limited: on a CPU even a prompt may be too much. It is the search that says by how much a rank has too little.
    with memory.unlimited():
        rollout = _worst_rollout(parts)
        if stage == TRAIN_POLICY:
            give_gradients(parts.models.value)
            update = partial(_update, parts)
    norm = getattr(runner.model, "norm", None)
    return TrainingStep(
        runner=runner,
        sample=rollout,
        update=update,
        optimizers=(),  # as_in_training keeps and restores what there is
        boundaries={"layers": norm} if norm is not None else {},
    )


def _worst_rollout(parts: RolloutParts) -> Rollout:
    sample = worst_sample(
        parts.settings.config, parts.data, parts.data.kind, parts.tokenizer, parts.adaptive.sequence_length
    )
    return worst_rollout(torch.as_tensor(sample["tokens"], dtype=torch.long), parts.ppo.max_generated_tokens)


def _do_nothing(result: StepResult) -> None:
    """The value model is updated with the policy, at the end of the step."""


def _update(parts: RolloutParts, result: StepResult) -> None:
    """Collective: the update of both models; what the next probe finds is as it was before."""
    parts.optimization.update({"policy": result.target_tokens, "value": result.target_tokens})
    give_gradients(parts.models.value)


def _table(found: Mapping[str, Event]) -> str:
    """What every stage has come to, before training."""
    lines = [f"  {'stage':<28}rows   peak       of budget"]
    for stage, event in found.items():
        peak, budget = event.peak_bytes or 0, event.budget_bytes or 1
        lines.append(f"  {stage:<28}{event.after:<7}{format_bytes(peak):<11}{100 * peak / budget:6.0f} %")
    return "\n".join(["what fits in each stage, beside all four models", *lines])


def start_schedules(parts: RolloutParts, progress: Progress) -> None:
    """Sets learning rate and limits to where the run has come to."""
    updates = parts.ppo.updates
    total = updates * parts.ppo.iterations(dist.get_world_size())
    parts.optimization.start_schedule(total_steps=total, steps_done=updates * progress.step, lr_factor=1.0)
    if progress.limit is not None:
        parts.stages.load_state_dict(progress.limit)


def begin_epoch(
    parts: RolloutParts, progress: Progress, sizes: EpochSizes, restore: Callable[[], None]
) -> Iterator[list[Any]]:
    """Collective: the prompts of each iteration that is left of an epoch."""
    for stage, runner in parts.stages.runners.items():
        parts.journal.limit(runner.limit, progress.step, stage, f"epoch {sizes.epoch}")
    within = progress.steps_in_epoch > 0
    # The loader draws from the generators when an epoch begins: in the middle of one that draw is behind us.
    if not within:
        restore()
    prompts = parts.data.loader.epoch(
        sizes.epoch,
        samples_per_step=sizes.samples_per_step,
        steps=sizes.steps - progress.steps_in_epoch,
        samples_done=progress.samples_in_epoch,
    )
    if within:
        restore()
    return prompts
