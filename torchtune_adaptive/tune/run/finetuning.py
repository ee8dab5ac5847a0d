"""What both recipes do alike once they are set up: plan the epochs, train them step by step, save."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from torchtune_adaptive.memory.device import MemorySource
from torchtune_adaptive.schedules.growth import EpochPlan, total_steps
from torchtune_adaptive.search.probe import TrainingStep
from torchtune_adaptive.step.runner import StepRunner
from torchtune_adaptive.tune.parts.checkpoints import AdapterCheckpoints, FullCheckpoints
from torchtune_adaptive.tune.parts.culprits import naming_unknown_tokens
from torchtune_adaptive.tune.parts.data import Data
from torchtune_adaptive.tune.parts.memory_limit import limited_memory, resident_tensors
from torchtune_adaptive.tune.parts.microbatch import Sample
from torchtune_adaptive.tune.parts.optimization import Optimization
from torchtune_adaptive.tune.run.epochs import announce, build_increase_function, plan_epochs
from torchtune_adaptive.tune.run.fitting import rows_that_fit, training_step
from torchtune_adaptive.tune.run.journal import RunJournal
from torchtune_adaptive.tune.run.loss_watch import LossWatch
from torchtune_adaptive.tune.run.metrics import Metrics
from torchtune_adaptive.tune.run.progress import Progress
from torchtune_adaptive.tune.run.token_budget import Microbatches, microbatches_of
from torchtune_adaptive.tune.run.worst_case import worst_sample
from torchtune_adaptive.tune.start.sections import AdaptiveConfig
from torchtune_adaptive.tune.start.settings import Settings


@dataclass(kw_only=True)
class Finetuning:
    """A run whose parts a recipe has built."""

    cfg: DictConfig
    settings: Settings
    adaptive: AdaptiveConfig
    device: torch.device
    ranks: int
    """Of the data: each trains on samples of its own."""
    checkpoints: FullCheckpoints | AdapterCheckpoints
    model: nn.Module
    optimization: Optimization
    data: Data
    runner: StepRunner[Sample]
    metrics: Metrics
    journal: RunJournal
    profiler: Any
    progress: Progress
    global_step: int = field(init=False, default=0)
    plans: tuple[EpochPlan, ...] = field(init=False)
    microbatches: Microbatches = field(init=False)
    losses: LossWatch = field(init=False)

    def plan(self, tokenizer: Any, loss_fn: nn.Module) -> None:
        """Collective: every epoch, with microbatches of the configured rows or of as many as fit."""
        cfg, settings, adaptive, samples = self.cfg, self.settings, self.adaptive, self.data.loader.samples_per_rank

        def worst_step() -> TrainingStep[Sample]:
            sample = worst_sample(cfg, self.data, tokenizer, adaptive.sequence_length)
            return training_step(self.runner, self.optimization, loss_fn, sample)

        self.journal.start(total_steps(self.progress.past))
        with self.limited_memory() as memory:
            found = self.journal.found
            rows = rows_that_fit(cfg, settings, adaptive, memory, worst_step, samples, found)
            increase = build_increase_function(cfg)
            self.plans = plan_epochs(settings, adaptive, increase, rows, self.progress, samples)
            most = max(plan.samples_per_step for plan in self.plans)
            self.microbatches = microbatches_of(cfg, settings, adaptive, memory, worst_step, self.data, found, most)
        announce(self.plans, settings, self.progress, self.ranks, self.microbatches.limit)
        self._start_schedules()

    def train(self) -> None:
        """Collective: the epochs that are left, each with its checkpoint."""
        self.losses = LossWatch(self.adaptive.on_nan_loss)
        self.profiler.start()
        with self.limited_memory() as memory:
            self.watch(memory)
            for plan in self.plans[self.progress.epochs_run :]:
                self.train_epoch(plan)
        self.profiler.stop()

    def limited_memory(self) -> AbstractContextManager[MemorySource | None]:
        resident = resident_tensors(self.model, self.optimization.optimizers)
        return limited_memory(self.adaptive.memory_limit, self.device, resident)

    def watch(self, memory: MemorySource | None) -> None:
        self.runner.watch(memory)
        self.metrics.watch(memory)

    def close(self) -> None:
        self.runner.close()
        self.metrics.close()
        self.journal.close()

    def _start_schedules(self) -> None:
        """Learning rate and limit, from where the run has come to."""
        self.global_step = total_steps(self.plans[: self.progress.epochs_run])
        self.optimization.start_schedule(
            total_steps=total_steps(self.plans),
            steps_done=self.global_step,
            lr_factor=self.progress.past[-1].lr_factor if self.progress.past else 1.0,
        )
        self.runner.use_limit(self.microbatches.limit_of(self.plans[self.progress.epochs_run]))
        if self.progress.limit is not None:
            self.runner.load_state_dict(self.progress.limit)

    def train_epoch(self, plan: EpochPlan) -> None:
        """Collective: one epoch and its checkpoint."""
        self.journal.epoch(plan, self.progress.past, self.global_step, self.ranks)
        self.runner.use_limit(self.microbatches.limit_of(plan))
        self.optimization.use_lr_factor(plan.lr_factor)
        steps = self.microbatches.steps(self.data.loader, plan)
        # this step's samples, and the next one's, which may have been read already
        with naming_unknown_tokens(self.model, self.data.dataset, last=2 * plan.samples_per_step):
            for samples, upcoming in self.metrics.epoch(plan, steps):
                self._train_step(samples, upcoming)
        self.losses.check()
        self.progress = self.progress.after_epoch(plan, self.ranks, self.runner.state_dict())
        self.save_checkpoint(plan.epoch)

    def _train_step(self, samples: list[Sample], upcoming: list[Sample] | None) -> None:
        """Collective: gradients of all samples, and one update."""
        result = self.runner.run(samples, step=self.global_step + 1, upcoming=upcoming)
        with self.runner.committing("the optimizer step", last_checkpoint=self.checkpoints.last):
            grad_norm = self.optimization.update(result.target_tokens)
        self.global_step += 1
        learning_rate = self.optimization.learning_rate()
        loss = self.metrics.log_step(
            self.global_step, result, self.runner.recoveries, learning_rate=learning_rate, grad_norm=grad_norm
        )
        self.losses.saw(self.global_step, loss, result.target_tokens, grad_norm)
        self.profiler.step()

    def save_checkpoint(self, epoch: int) -> None:
        """Collective: weights of this epoch, and what is needed to go on."""
        self.checkpoints.save(
            epoch, self.model, self.optimization.checkpointed, self.progress, self.data.loader.state_dict()
        )
