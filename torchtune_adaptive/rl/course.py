"""The course of a run: its iterations and epochs of prompts, and where it has come to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from torchtune_adaptive.checkpoints.progress import Progress, SavedLimits
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.rl.models import Models
from torchtune_adaptive.rl.settings import PPOSettings
from torchtune_adaptive.rl.stages import RolloutStages
from torchtune_adaptive.schedules.growth import EpochSizes
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.oversize import Admission
from torchtune_adaptive.tune.run_parts import RunParts
from torchtune_adaptive.tune.samples import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutParts(RunParts):
    """The parts of a run that trains on rollouts."""

    ppo: PPOSettings
    models: Models
    rollout_stages: RolloutStages
    """What runs the stages."""

    @property
    def reader(self) -> nn.Module:
        return self.models.policy

    def limits(self) -> SavedLimits:
        return self.rollout_stages.state_dict()


def plot_epochs(parts: RolloutParts, progress: Progress) -> tuple[tuple[EpochSizes, ...], Progress]:
    """Every epoch of the run: what is over, what is under way, and what `num_steps` leaves to be done."""
    ranks, size = dist.get_world_size(), parts.settings.batch_size
    if progress.step and progress.ranks != ranks:
        raise ConfigError(
            f"the checkpoint was saved on {count_of(progress.ranks, 'rank')}, but there are {ranks} now: batch_size is "
            f"per rank, so an iteration would have other samples; resume on {progress.ranks}"
        )
    per_epoch, total = parts.data.loader.samples_per_rank // size, parts.ppo.iterations(ranks)
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


def start_schedules(parts: RolloutParts, progress: Progress) -> None:
    """Sets learning rate and limits to where the run has come to."""
    updates = parts.ppo.updates
    total = updates * parts.ppo.iterations(dist.get_world_size())
    parts.optimization.start_schedule(total_steps=total, steps_done=updates * progress.step, lr_factor=1.0)
    if progress.limit is not None:
        parts.rollout_stages.load_state_dict(progress.limit)


def begin_epoch(
    parts: RolloutParts, progress: Progress, sizes: EpochSizes, admission: Admission | None
) -> Iterator[list[Sample]]:
    """Collective: the prompts of each iteration that is left of an epoch, each as `admission` lets it in."""
    for stage, limit in parts.stages.limits.items():
        parts.journal.limit(limit, progress.step, stage, f"epoch {sizes.epoch}")
    with parts.checkpoints.going_on_to_draw(progress):
        prompts = parts.data.loader.epoch(
            sizes.epoch,
            samples_per_step=sizes.samples_per_step,
            steps=sizes.steps - progress.steps_in_epoch,
            samples_done=progress.samples_in_epoch,
        )
    return prompts if admission is None else admission.telling(map(admission.admit, prompts), sizes.epoch)
