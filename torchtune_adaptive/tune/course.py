"""Before the first step: what every epoch of a run on a dataset will be, and where its schedules stand."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.ranks import from_rank_0
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.tune.dealing import dealer_of
from torchtune_adaptive.tune.fit import limits_by_length, rows_that_fit
from torchtune_adaptive.tune.schedule import (
    announce,
    asks_what_was_measured,
    build_increase_function,
    end_of_begun_epoch,
    size_by_what_was_measured,
    size_epochs,
    total_steps,
    whole_step_rows,
)
from torchtune_adaptive.tune.trainer import Course, Trainer, restore_limits


def plan_course(trainer: Trainer) -> None:
    """Collective: searches where the config asks for it, sizes every epoch, and sets schedules to where the run is."""
    run, data, stages = trainer.run, trainer.data, trainer.stages
    settings, ranks = run.settings, run.place.ranks
    *earlier, training = stages
    before = replace(run.progress, dataset_samples=len(data.dataset))
    if before.begun is not None and run.progress.dataset_samples not in (None, before.dataset_samples):
        raise ConfigError(
            f"dataset has {before.dataset_samples} samples, but had {run.progress.dataset_samples} when the "
            "checkpoint was saved in the middle of an epoch, so that epoch cannot be resumed: restore the dataset, "
            "or resume from an earlier epoch"
        )
    run.journal.start(before.step)
    with trainer.limited_memory() as memory:
        rows = rows_that_fit(trainer, memory, training, whole_step_rows=whole_step_rows(settings, before))
        left = data.loader.samples_left_per_rank(before.samples_in_epoch)
        progress = end_of_begun_epoch(before, rows, left, ranks)
        increase, samples = build_increase_function(settings.config), data.loader.samples_per_rank
        with nullcontext() if memory is None else memory.unlimited():
            # as on rank 0, since a function of the user's may draw, or read a clock
            epochs = from_rank_0(size_epochs(settings, progress, samples, rows_that_fit=rows, increase=increase))
        most_samples = max(sizes.samples_per_step for sizes in epochs)
        limits = limits_by_length(trainer, memory, most_samples)
        if rows is not None:
            searched = {stage: rows_that_fit(trainer, memory, stage, most_samples=most_samples) for stage in earlier}
            limits |= {stage: RowLimit(most) for stage, most in searched.items() if most is not None}
        limit = limits.get(training)
        dealer = dealer_of(trainer.model, settings, data, limit)
        announce(epochs, settings, before, ranks, limit, samples)
        for stage in earlier:
            if stage in limits:
                say(f"{stage}: at most {limits[stage]} a microbatch")
        run.checkpoints.make_room()
    looks_ahead = limit is not None and limit.by_length
    trainer.course = Course(
        epochs=epochs,
        limits=limits,
        dealer=dealer,
        looks_ahead=looks_ahead,
        resize=partial(size_by_what_was_measured, settings, increase=increase, rows_that_fit=rows)
        if asks_what_was_measured(increase)
        else None,
        resize_every=settings.adaptive.increase_every,
    )
    # torchtune's own checkpoints do not count steps
    step = total_steps(epochs[: progress.epochs_run]) + progress.steps_in_epoch
    latest = progress.begun or (progress.past[-1] if progress.past else None)
    whole, done = total_steps(epochs), float(step)
    if trainer.course.resize is not None:
        # how many steps there will be is not known: the schedule counts them as configured
        of_an_epoch = min(samples // settings.samples_per_step, progress.max_steps_per_epoch or samples)
        whole, done = progress.total_epochs * of_an_epoch, progress.samples / (settings.samples_per_step * ranks)
    trainer.optimization.start_schedule(
        total_steps=whole,
        steps_done=done,
        lr_factor=latest.lr_factor if latest else 1.0,
        strides=trainer.course.resize is not None,
    )
    stages.use_limits(trainer.course.limits_of(stages, epochs[progress.epochs_run]))
    if progress.limit is not None:
        restore_limits(stages, progress.limit)
    run.progress = replace(progress, step=step, ranks=ranks)
