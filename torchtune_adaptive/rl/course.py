"""The course of a run: its iterations and epochs of prompts, and where it has come to."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch.distributed as dist

from torchtune_adaptive.checkpoints.progress import EpochSizes
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.step import Stages
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.rl.models import Models
from torchtune_adaptive.rl.rollouts import Rollout
from torchtune_adaptive.rl.settings import PPOSettings
from torchtune_adaptive.rl.stages import RolloutStages
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.optimizer import Optimization
from torchtune_adaptive.tune.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """The parts of a run that trains on rollouts."""

    trainer: Trainer
    ppo: PPOSettings
    models: Models
    rollout_stages: RolloutStages
    """What runs the stages."""

    @property
    def settings(self) -> Settings:
        return self.trainer.run.settings

    @property
    def data(self) -> Data:
        return self.trainer.data

    @property
    def optimization(self) -> Optimization:
        return self.trainer.optimization

    @property
    def stages(self) -> Stages[Rollout]:
        return self.rollout_stages.runners


def plot_epochs(parts: RolloutParts) -> tuple[EpochSizes, ...]:
    """Every epoch of the run: what is over, what is under way, and what `num_steps` leaves to be done."""
    ranks, size, progress = dist.get_world_size(), parts.settings.batch_size, parts.trainer.run.progress
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
    parts.trainer.run.progress = replace(progress, total_epochs=len(epochs), ranks=ranks)
    return tuple(epochs)


def start_schedules(parts: RolloutParts) -> None:
    """Sets learning rate and limits to where the run has come to."""
    updates, progress = parts.ppo.updates, parts.trainer.run.progress
    total = updates * parts.ppo.iterations(dist.get_world_size())
    parts.optimization.start_schedule(total_steps=total, steps_done=updates * progress.step, lr_factor=1.0)
    if progress.limit is not None:
        parts.rollout_stages.load_state_dict(progress.limit)
