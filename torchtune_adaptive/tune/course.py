"""Before the first step: how large a microbatch may be, and what every epoch of a run on a dataset will be."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torch import nn

from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit, longest_row
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.probes import TrainingStep
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError, SampleTooLargeError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune import fit
from torchtune_adaptive.tune.bad_samples import longest_taken
from torchtune_adaptive.tune.dealing import dealer_of
from torchtune_adaptive.tune.longest_sample import longest_sample, worst_sample
from torchtune_adaptive.tune.model import phase_boundaries
from torchtune_adaptive.tune.optimizer import Optimization
from torchtune_adaptive.tune.preference import KEPT, POLICY, REFERENCE
from torchtune_adaptive.tune.samples import Kind, Sample
from torchtune_adaptive.tune.schedule import (
    announce,
    build_increase_function,
    end_of_begun_epoch,
    size_epochs,
    total_steps,
    whole_step_rows,
)
from torchtune_adaptive.tune.token_budget import LONGEST_SAMPLE, admission_of, rows_of_packs
from torchtune_adaptive.tune.trainer import Course, Trainer, restore_limits

LOOKED_AT = 64
"""Samples that are looked at for the median length, spread over the dataset."""
LONG_TAIL = 2
"""A longest sample of this many times the median is worth a line in the log."""
FOLDERS = {REFERENCE: "reference"}
"""Where the record of a stage's search lies in `output_dir`, if not at its top."""
SKIPPED = "skipped: a CPU has no memory limit to search within; set adaptive.memory_limit"


def plan_course(trainer: Trainer) -> None:
    """Collective: searches where the config asks for it, sizes every epoch, and sets schedules to where the run is."""
    run, data, stages = trainer.run, trainer.data, trainer.stages
    settings, ranks, training = run.settings, run.place.ranks, [*stages][-1]
    with trainer.limited_memory() as memory:
        before = replace(run.progress, dataset_samples=len(data.dataset))
        if before.begun is not None and run.progress.dataset_samples not in (None, before.dataset_samples):
            raise ConfigError(
                f"dataset has {before.dataset_samples} samples, but had {run.progress.dataset_samples} when the "
                "checkpoint was saved in the middle of an epoch, so that epoch cannot be resumed: restore the dataset, "
                "or resume from an earlier epoch"
            )
        run.open_record()
        rows = rows_that_fit(trainer, memory, training, whole_step_rows=whole_step_rows(settings, before))
        left = data.loader.samples_left_per_rank(before.samples_in_epoch)
        progress = end_of_begun_epoch(before, rows, left, ranks)
        increase, samples = build_increase_function(settings.config), data.loader.samples_per_rank
        epochs = size_epochs(settings, progress, samples, rows_that_fit=rows, increase=increase)
        most_samples = max(sizes.samples_per_step for sizes in epochs)
        limit = limit_by_length(trainer, memory, training, most_samples)
        earlier = reference_limit(trainer, memory, most_samples) if REFERENCE in stages else None
        admission = None
        if limit is not None and data.packed:
            limit = rows_of_packs(limit, data.kind.length_of(data.dataset[0]))
        elif limit is not None:
            longest = min(longest_row(each, LONGEST_SAMPLE) for each in (limit, earlier) if each is not None)
            taken = longest_taken([trainer.model])
            if taken is not None and settings.adaptive.oversize != "error":
                longest = min(longest, trainer.kind.length_at(taken))
            admission = admission_of(settings, data, trainer.kind, longest)
        dealer, by_length = dealer_of(trainer.model, settings, data, limit), limit is not None and limit.by_length
        announce(epochs, settings, before, ranks, limit, samples)
        if earlier is not None:
            most = count_of(earlier.rows, "pair") if isinstance(earlier, RowLimit) else earlier
            say(f"{REFERENCE}: at most {most} a microbatch")
        run.checkpoints.make_room()
    limits = {} if limit is None else dict.fromkeys(stages, limit)
    trainer.course = Course(
        epochs=epochs,
        limits=limits if earlier is None else {**limits, REFERENCE: earlier},
        admission=admission,
        dealer=dealer if by_length else None,
        looks_ahead=by_length,
    )
    _start_schedules(trainer, progress)


def rows_that_fit(
    trainer: Trainer,
    memory: MemorySource | None,
    stage: str,
    *,
    most_samples: int | None = None,
    whole_step_rows: int | None = None,
) -> int | None:
    """Collective: the most rows of a microbatch, if the config asks for them or for growth up to them.

    A rank has `most_samples` to run at most, or all those of an epoch. From `whole_step_rows` on a step is one
    microbatch.
    """
    settings, adaptive = trainer.run.settings, trainer.run.settings.adaptive
    grows = settings.config.get("batch_increase_function") is not None and adaptive.max_batch_size is None
    if adaptive.token_budget is not None or not (settings.use_maximum_batch_size or grows):
        return None
    if memory is None:
        say(f"batch search · {SKIPPED}")
        return None
    most = most_samples or trainer.data.loader.samples_per_rank
    most_rows, step = min(most, adaptive.max_batch_size or most), _worst_step(trainer, stage)
    rows = fit.rows(
        trainer.run,
        step,
        memory,
        trainer.kind,
        most_rows=most_rows,
        whole_step_rows=whole_step_rows,
        folder=FOLDERS.get(stage, ""),
    ).rows
    if rows < settings.samples_per_step and step.runner is trainer.stages.training:
        _tell_of_short_samples(trainer, step.length)
    return rows


def limit_by_length(trainer: Trainer, memory: MemorySource | None, stage: str, most_rows: int) -> Limit | None:
    """Collective: the token budget of the config, or what was measured; None without one, or where nothing can be.

    A step has `most_rows` samples at most.
    """
    settings, data, kind = trainer.run.settings, trainer.data, trainer.kind
    budget = settings.adaptive.token_budget
    if budget is None or isinstance(budget, int):
        return None if budget is None else TokenLimit(budget, kind.padded_rows)
    if memory is None:
        say(f"token budget · {SKIPPED}, or the budget to a number")
        return None
    step = _worst_step(trainer, stage)
    if data.packed:
        return RowLimit(
            fit.rows(trainer.run, step, memory, kind, most_rows=most_rows, folder=FOLDERS.get(stage, "")).rows
        )
    try:
        return fit.profile(trainer.run, step, memory, kind, most_rows=most_rows, folder=FOLDERS.get(stage, "")).limit
    except OneRowDoesNotFitError as error:
        if settings.adaptive.sequence_length or data.max_seq_len:
            raise
        index = longest_sample(settings.config, data.dataset, kind).at
        raise SampleTooLargeError(
            f"sample {index} of the dataset is the longest, and {error.fact}", *error.remedies
        ) from None


def reference_limit(trainer: Trainer, memory: MemorySource | None, most_samples: int) -> Limit | None:
    """Collective: what fits in the stage before training, where the config asks for that to be found or says it."""
    if trainer.run.settings.adaptive.token_budget is not None:
        return limit_by_length(trainer, memory, REFERENCE, most_samples)
    rows = rows_that_fit(trainer, memory, REFERENCE, most_samples=most_samples)
    return None if rows is None else RowLimit(rows)


def _tell_of_short_samples(trainer: Trainer, longest: int) -> None:
    """Says that rows leave memory unused where most samples are far shorter than the longest."""
    settings, data, kind = trainer.run.settings, trainer.data, trainer.kind
    if data.packed or settings.optimizer_in_bwd:
        return
    lengths = [
        kind.length_of(data.dataset[at]) for at in range(0, len(data.dataset), -(-len(data.dataset) // LOOKED_AT))
    ]
    median = statistics.median_low(lengths)
    if LONG_TAIL * median <= longest:
        say(
            f"the median sample has {median} tokens{kind.length_suffix}, but rows were measured with {longest}: "
            "adaptive.token_budget=auto use_maximum_batch_size=False would run more samples at once"
        )


def _worst_step(trainer: Trainer, stage: str) -> TrainingStep[Sample]:
    """Collective: the step that a search of this stage measures."""
    settings, kind, runner = trainer.run.settings, trainer.kind, trainer.stages.training
    sample = worst_sample(settings.config, trainer.data, kind, settings.adaptive.sequence_length)
    if runner.stage == POLICY:
        sample = {**sample, KEPT: torch.zeros(2)}
    training = training_step(runner, trainer.optimization, trainer.loss_fn, kind, sample)
    if stage == runner.stage:
        return training
    runner = trainer.stages[stage]
    return TrainingStep(
        runner=runner,
        sample=sample,
        update=None,
        optimizers=(),
        boundaries=phase_boundaries(runner.model, None),
        cut=kind.cut,
        # asked before training, it runs when there is no optimizer state yet, and never again
        beside=() if settings.adaptive.precompute_reference else (training,),
    )


def training_step(
    runner: StepRunner[Sample], optimization: Optimization, loss_fn: nn.Module | None, kind: Kind, sample: Sample
) -> TrainingStep[Sample]:
    """The recipe's step, as a search runs it."""
    return TrainingStep(
        runner=runner,
        sample=sample,
        update=lambda result: optimization.update(result.target_tokens),
        optimizers=optimization.optimizers,
        boundaries=phase_boundaries(runner.model, loss_fn),
        cut=kind.cut,
    )


def _start_schedules(trainer: Trainer, progress: Progress) -> None:
    """Sets learning rate and limits to where the run has come to."""
    epochs, stages = trainer.course.epochs, trainer.stages
    # torchtune's own checkpoints do not count steps
    step = total_steps(epochs[: progress.epochs_run]) + progress.steps_in_epoch
    latest = progress.begun or (progress.past[-1] if progress.past else None)
    trainer.optimization.start_schedule(
        total_steps=total_steps(epochs), steps_done=step, lr_factor=latest.lr_factor if latest else 1.0
    )
    stages.use_limits(trainer.course.limits_of(stages, epochs[progress.epochs_run]))
    if progress.limit is not None:
        restore_limits(stages, progress.limit)
    trainer.run.progress = replace(progress, step=step, ranks=trainer.run.place.ranks)
