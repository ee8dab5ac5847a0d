"""What every recipe has built when its steps begin, whatever it trains: what is limited, saved and closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchtune_adaptive.checkpoints.progress import Progress, SavedLimits
from torchtune_adaptive.checkpoints.saving import Checkpoints
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.step import Stages
from torchtune_adaptive.life.console import say
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.limited_memory import limited_memory, resident_tensors
from torchtune_adaptive.tune.loss_watch import LossWatch
from torchtune_adaptive.tune.metrics import Metrics
from torchtune_adaptive.tune.optimizer import Optimization
from torchtune_adaptive.tune.process_group import Place
from torchtune_adaptive.tune.run_journal import RunJournal


@dataclass(frozen=True, kw_only=True)
class RunParts(ABC):
    """The parts of a run."""

    settings: Settings
    place: Place
    model: nn.Module
    """What is trained and saved."""
    data: Data
    optimization: Optimization
    stages: Stages[Any]
    checkpoints: Checkpoints
    metrics: Metrics
    journal: RunJournal

    @property
    def reader(self) -> nn.Module:
        """The model that is given the samples of the dataset."""
        return self.model

    @abstractmethod
    def limits(self) -> SavedLimits:
        """What the limits have come to, for a checkpoint."""

    def limited_memory(self) -> AbstractContextManager[MemorySource | None]:
        """The memory that this rank may use, which the models of all stages and the optimizers live in."""
        models = nn.ModuleList(runner.model for runner in self.stages.values())
        resident = resident_tensors(models, self.optimization.optimizers)
        return limited_memory(self.settings.adaptive.memory_limit, self.place.device, resident)

    @contextmanager
    def training(self, *, suspects: int) -> Iterator[None]:
        """Open it around the steps: memory is limited and measured, and the samples that a step fails on are named.

        `suspects`: how many of those that were read last may be to blame.
        """
        with self.limited_memory() as memory, self.data.naming_bad_samples(self.reader, last=suspects):
            self.stages.watch(memory)
            self.metrics.watch(memory)
            yield

    def save(self, progress: Progress) -> None:
        """Collective: all that is needed to go on from here."""
        progress = replace(progress, limit=self.limits())
        optimizer, loader_state = self.optimization.checkpointed, self.data.loader.state_dict()
        self.checkpoints.save(progress, self.model, optimizer, loader_state)

    def save_if_due(self, progress: Progress, losses: LossWatch, *, asked_to_stop: bool) -> None:
        """Collective: after a step. Saves within an epoch where it is time to; ends the run if the ranks have agreed to
        stop."""
        if self.checkpoints.due(progress, asked_to_stop):
            if losses.worth_saving(progress.step):
                self.save(progress)
            self.checkpoints.end_if_asked(progress, asked_to_stop)

    def save_epoch(self, progress: Progress, losses: LossWatch, *, asked_to_stop: bool) -> None:
        """Collective: after the last step of an epoch."""
        losses.check()
        self.save(progress)
        self.checkpoints.end_if_asked(progress, asked_to_stop)

    def close(self) -> None:
        """Collective: finishes what is being written, and draws the picture of the run."""
        self.checkpoints.close()
        self.stages.training.close()
        self.metrics.close()
        self.journal.close()


def restore_limits(stages: Stages[Any], saved: SavedLimits) -> None:
    """Restores a checkpoint's limits, by stage; says so where one differs from what was just found or configured."""
    for stage in (name for name in saved if name in stages):
        runner, found = stages[stage], stages[stage].limit
        runner.load_state_dict(saved[stage])
        if runner.limit != found:
            say(f"{stage}{' · ' * bool(stage)}in microbatches of at most {runner.limit} (restored from the checkpoint)")
