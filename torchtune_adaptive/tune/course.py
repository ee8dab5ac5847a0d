"""Before the first step: how large a microbatch may be, and what every epoch of the run will be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from torchtune_adaptive.checkpoints.progress import Progress, SavedLimits
from torchtune_adaptive.engine.limits import Limit, RowLimit
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.probes import TrainingStep
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.schedules.growth import EpochSizes, total_steps
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.culprits import longest_taken
from torchtune_adaptive.tune.epochs import (
    announce,
    build_increase_function,
    end_of_begun_epoch,
    size_epochs,
    whole_step_rows,
)
from torchtune_adaptive.tune.fitting import FitRequest, forward_step, rows_that_fit, training_step
from torchtune_adaptive.tune.longest_sample import worst_sample
from torchtune_adaptive.tune.preference import KEPT, POLICY, REFERENCE
from torchtune_adaptive.tune.run_parts import RunParts, restore_limits
from torchtune_adaptive.tune.sample_exchange import dealer_of
from torchtune_adaptive.tune.samples import Kind, Sample
from torchtune_adaptive.tune.token_budget import Microbatches, budget_limit, microbatches_of

Steps = Iterator[tuple[list[Sample], list[Sample] | None]]


@dataclass(frozen=True, kw_only=True)
class Parts(RunParts):
    """The parts of a run that trains on a dataset. On pairs there are two stages: the reference before the policy,
    unless it has been asked of all pairs."""

    loss_fn: nn.Module

    @property
    def trains(self) -> str:
        """The name of the stage that trains."""
        return [*self.stages][-1]

    @property
    def kind(self) -> Kind:
        return replace(self.data.kind, padded=self.stages.training.kind.padded)

    def worst_step(self) -> TrainingStep[Sample]:
        """Collective: the step that a search measures."""
        return training_step(self.stages.training, self.optimization, self.loss_fn, self.kind, self._worst_sample())

    def worst_reference_step(self) -> TrainingStep[Sample]:
        """Collective: the same for the stage before training."""
        # asked before training, it runs when there is no optimizer state yet, and never again
        training = [] if self.settings.adaptive.precompute_reference else [self.worst_step()]
        return forward_step(self.stages[REFERENCE], self.kind, self._worst_sample(), *training)

    def _worst_sample(self) -> Sample:
        length = self.settings.adaptive.sequence_length
        sample = worst_sample(self.settings.config, self.data, self.kind, length)
        return {**sample, KEPT: torch.zeros(2)} if self.trains == POLICY else sample

    def fit_request(self, memory: MemorySource | None, whole_step_rows: int | None) -> FitRequest:
        return FitRequest(
            settings=self.settings,
            memory=memory,
            worst_step=self.worst_step,
            data=self.data,
            kind=self.kind,
            record=self.journal.search,
            whole_step_rows=whole_step_rows,
            stage=self.trains,
        )

    def fit_reference(self, memory: MemorySource | None) -> FitRequest:
        """What has to fit in the stage before training."""
        training = self.fit_request(memory, None)
        return replace(training, worst_step=self.worst_reference_step, stage=REFERENCE, folder="reference")

    def limits(self) -> SavedLimits:
        """What the limits have come to, for a checkpoint: that of training as it is, others by their names."""
        states = self.stages.state_dict()
        return {**states.pop(self.trains), **states}

    def restore_limits(self, saved: SavedLimits) -> None:
        restore_limits(self.stages, {self.trains: saved, **saved})

    def use_limits(self, course: Course, sizes: EpochSizes) -> None:
        """Uses the epoch's limits from the next step on, in every stage."""
        limits = dict.fromkeys(self.stages, course.microbatches.limit_of(sizes))
        if REFERENCE in limits and course.reference_limit is not None:
            limits[REFERENCE] = course.reference_limit
        self.stages.use_limits(limits)


@dataclass(frozen=True)
class Course:
    """The run as it will be."""

    epochs: tuple[EpochSizes, ...]
    microbatches: Microbatches
    reference_limit: Limit | None = None
    """Limit of the stage before training, where one was measured; None: as for training."""

    @property
    def suspects(self) -> int:
        """The samples read last, one of which a step may have failed on."""
        # a step's samples, where they are read ahead the next one's, and those that travel between the ranks
        return 5 * max(sizes.samples_per_step for sizes in self.epochs)


def plot_course(parts: Parts, progress: Progress) -> tuple[Course, Progress]:
    """Collective: searches where the config asks for it, sizes every epoch, and sets schedules to where the run is."""
    settings, data = parts.settings, parts.data
    with parts.limited_memory() as memory, data.naming_bad_samples(parts.model, last=1):
        progress = _with_dataset(progress, len(data.dataset))
        open_record(parts, progress)
        request = parts.fit_request(memory, whole_step_rows(settings, progress))
        rows = rows_that_fit(request)
        left = data.loader.samples_left_per_rank(progress.samples_in_epoch)
        before, progress = progress, end_of_begun_epoch(progress, rows, left, parts.place.ranks)
        increase = build_increase_function(settings.config)
        epochs = size_epochs(settings, increase, rows, progress, data.loader.samples_per_rank)
        most_samples = max(sizes.samples_per_step for sizes in epochs)
        limit = budget_limit(request, most_samples)
        earlier = reference_limit(parts, memory, most_samples)
        longest_of_model = longest_taken([parts.model])
        microbatches = microbatches_of(request, limit, earlier=earlier, longest_of_model=longest_of_model)
        dealer = dealer_of(parts.model, settings, data, microbatches.limit)
        microbatches = replace(microbatches, dealer=dealer)
        samples = data.loader.samples_per_rank
        announce(epochs, settings, before, parts.place.ranks, microbatches.limit, samples)
        if earlier is not None:
            most = count_of(earlier.rows, "pair") if isinstance(earlier, RowLimit) else earlier
            say(f"{REFERENCE}: at most {most} a microbatch")
        parts.checkpoints.make_room()
        course = Course(epochs, microbatches, earlier)
    return course, _start_schedules(parts, course, progress)


def open_record(parts: Parts, progress: Progress) -> None:
    """Opens the record where the run has come to."""
    parts.journal.start(progress.step or total_steps(progress.past))


def reference_limit(parts: Parts, memory: MemorySource | None, most_samples: int) -> Limit | None:
    """Collective: what fits in the stage before training, where the config asks for that to be found or says it."""
    if REFERENCE not in parts.stages:
        return None
    request = parts.fit_reference(memory)
    if parts.settings.adaptive.token_budget is not None:
        return budget_limit(request, most_samples)
    rows = rows_that_fit(request, most_samples)
    return None if rows is None else RowLimit(rows)


def begin_epoch(parts: Parts, course: Course, progress: Progress, sizes: EpochSizes) -> Steps:
    """Collective: sets limit and learning rate, and yields the steps that are left of the epoch.

    A step is the samples of this rank and, where they are planned ahead, those of the next step.
    """
    parts.use_limits(course, sizes)
    parts.journal.epoch(sizes, parts.stages.limits, progress, parts.place.ranks)
    parts.optimization.use_lr_factor(sizes.lr_factor)
    with parts.checkpoints.going_on_to_draw(progress):
        return course.microbatches.steps(
            parts.data.loader, sizes, steps_done=progress.steps_in_epoch, samples_done=progress.samples_in_epoch
        )


def _with_dataset(progress: Progress, samples: int) -> Progress:
    if progress.begun is not None and progress.dataset_samples not in (None, samples):
        raise ConfigError(
            f"dataset has {samples} samples, but had {progress.dataset_samples} when the checkpoint was saved in the "
            "middle of an epoch, so that epoch cannot be resumed: restore the dataset, or resume from an earlier epoch"
        )
    return replace(progress, dataset_samples=samples)


def _start_schedules(parts: Parts, course: Course, progress: Progress) -> Progress:
    """Sets learning rate and limit to where the run has come to."""
    # torchtune's own checkpoints do not count steps
    step = total_steps(course.epochs[: progress.epochs_run]) + progress.steps_in_epoch
    latest = progress.begun or (progress.past[-1] if progress.past else None)
    parts.optimization.start_schedule(
        total_steps=total_steps(course.epochs), steps_done=step, lr_factor=latest.lr_factor if latest else 1.0
    )
    parts.use_limits(course, course.epochs[progress.epochs_run])
    if progress.limit is not None:
        parts.restore_limits(progress.limit)
    return replace(progress, step=step, ranks=parts.place.ranks)
