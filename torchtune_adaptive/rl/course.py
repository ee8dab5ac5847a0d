"""The course of a run on rollouts: its iterations, its epochs of prompts, and the limit of each stage."""

from __future__ import annotations

from dataclasses import replace

from torchtune_adaptive.checkpoints.progress import EpochSizes
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.rl.limits import LimitFinder
from torchtune_adaptive.rl.settings import RolloutSettings
from torchtune_adaptive.rl.stages import RolloutStages
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.trainer import Course, Trainer


def plan_iterations(trainer: Trainer, stages: RolloutStages, rl: RolloutSettings) -> None:
    """Collective: searches where the config asks for it, and sets schedules and limits to where the run has come to."""
    run, progress = trainer.run, trainer.run.progress
    total = rl.iterations(run.place.ranks)
    epochs = _plot_epochs(trainer, rl, total)
    run.progress = replace(progress, total_epochs=len(epochs), ranks=run.place.ranks)
    run.journal.start(progress.step)
    with trainer.limited_memory() as memory:
        limits = LimitFinder(trainer, stages, rl).find(memory)
    stages.runners.use_limits(limits)
    run.checkpoints.make_room()
    trainer.course = Course(epochs=epochs, limits=limits)
    trainer.optimization.start_schedule(
        total_steps=rl.updates * total, steps_done=rl.updates * progress.step, lr_factor=1.0
    )
    if progress.limit is not None:
        stages.load_state_dict(progress.limit)


def _plot_epochs(trainer: Trainer, rl: RolloutSettings, total: int) -> tuple[EpochSizes, ...]:
    """Every epoch of the run: what is over, what is under way, and what is left of so many iterations."""
    ranks, size, progress = trainer.run.place.ranks, rl.batch_size, trainer.run.progress
    if progress.step and progress.ranks != ranks:
        raise ConfigError(
            f"the checkpoint was saved on {count_of(progress.ranks, 'rank')}, but there are {ranks} now: batch_size is "
            f"per rank, so an iteration would have other samples; resume on {progress.ranks}"
        )
    per_epoch, left = trainer.data.loader.samples_per_rank // size, total - progress.step
    epochs = list(progress.past)
    if progress.begun is not None:
        steps = min(per_epoch, progress.steps_in_epoch + left)
        epochs.append(replace(progress.begun, steps=steps))
        left -= steps - progress.steps_in_epoch
    while left > 0:
        steps = min(per_epoch, left)
        epochs.append(EpochSizes(len(epochs), size, 1, size, size, steps, lr_factor=1.0))
        left -= steps
    answers = f"{rl.answers * ranks} answers, {count_of(rl.updates, 'update')}"
    say(f"{count_of(total, 'iteration')} of {answers} each · {count_of(len(epochs), 'epoch')} of prompts")
    return tuple(epochs)
