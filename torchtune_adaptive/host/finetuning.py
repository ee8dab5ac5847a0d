"""What both recipes do alike once they are set up: plan the epochs, train them step by step, save."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from torchtune_adaptive.config import AdaptiveConfig
from torchtune_adaptive.host.batch_search import rows_that_fit, training_step
from torchtune_adaptive.host.checkpoints import AdapterCheckpoints, FullCheckpoints
from torchtune_adaptive.host.data import Data
from torchtune_adaptive.host.journal import RunJournal
from torchtune_adaptive.host.memory_limit import limited_memory, resident_tensors
from torchtune_adaptive.host.metrics import Metrics
from torchtune_adaptive.host.microbatch import Sample
from torchtune_adaptive.host.optimization import Optimization
from torchtune_adaptive.host.progress import Progress
from torchtune_adaptive.host.run_plan import announce, build_increase_function, plan_epochs
from torchtune_adaptive.host.settings import Settings
from torchtune_adaptive.host.token_budget import microbatches_of
from torchtune_adaptive.host.worst_case import worst_sample
from torchtune_adaptive.memory import MemorySource
from torchtune_adaptive.probe import TrainingStep
from torchtune_adaptive.schedules import EpochPlan, total_steps
from torchtune_adaptive.stepping import StepRunner


class Finetuning:
    """A recipe after its `setup`, which fills these in."""

    _cfg: DictConfig
    _settings: Settings
    _adaptive: AdaptiveConfig
    _device: torch.device
    _ranks: int
    _checkpoints: FullCheckpoints | AdapterCheckpoints
    _model: nn.Module
    _optimization: Optimization
    _data: Data
    _runner: StepRunner[Sample]
    _metrics: Metrics
    _journal: RunJournal
    _profiler: Any
    progress: Progress
    global_step: int

    def _plan_epochs(self, tokenizer: Any, loss_fn: nn.Module) -> tuple[EpochPlan, ...]:
        """Collective: every epoch, with microbatches of the configured rows or of as many as fit."""
        cfg, settings, adaptive, loader = self._cfg, self._settings, self._adaptive, self._data.loader

        def worst_step() -> TrainingStep[Sample]:
            sample = worst_sample(cfg, self._data, tokenizer, adaptive.sequence_length)
            return training_step(self._runner, self._optimization, loss_fn, sample)

        self._journal.start(total_steps(self.progress.past))
        with self._limited_memory() as memory:
            found = self._journal.event
            rows = rows_that_fit(cfg, settings, adaptive, memory, worst_step, loader.samples_per_rank, found)
            self._microbatches = microbatches_of(cfg, settings, adaptive, memory, worst_step, self._data, found)
        increase = build_increase_function(cfg)
        plans = plan_epochs(settings, adaptive, increase, rows, self.progress, loader.samples_per_rank)
        announce(plans, settings, self.progress, self._ranks, self._microbatches.limit)
        return plans

    def _limited_memory(self) -> AbstractContextManager[MemorySource | None]:
        resident = resident_tensors(self._model, self._optimization.optimizers)
        return limited_memory(self._adaptive.memory_limit, self._device, resident)

    def _start_schedules(self, plans: tuple[EpochPlan, ...]) -> None:
        """Learning rate and limit, from where the run has come to."""
        self._plans = plans
        self.global_step = total_steps(plans[: self.progress.epochs_run])
        self._optimization.start_schedule(
            total_steps=total_steps(plans),
            steps_done=self.global_step,
            lr_factor=self.progress.past[-1].lr_factor if self.progress.past else 1.0,
        )
        self._runner.use_limit(self._microbatches.limit_of(plans[self.progress.epochs_run]))
        if self.progress.limit is not None:
            self._runner.load_state_dict(self.progress.limit)

    def _watch(self, memory: MemorySource | None) -> None:
        self._runner.watch(memory)
        self._metrics.watch(memory)

    def _train_epoch(self, plan: EpochPlan) -> None:
        """Collective: one epoch and its checkpoint."""
        self._journal.epoch(plan, self.progress.past, self.global_step, self._ranks)
        self._runner.use_limit(self._microbatches.limit_of(plan))
        self._optimization.use_lr_factor(plan.lr_factor)
        steps = self._microbatches.steps(self._data.loader, plan)
        for samples, upcoming in self._metrics.epoch(plan, steps):
            self._train_step(samples, upcoming)
        self.progress = self.progress.after_epoch(plan, self._ranks, self._runner.state_dict())
        self._save_checkpoint(plan.epoch)

    def _train_step(self, samples: list[Sample], upcoming: list[Sample] | None) -> None:
        """Collective: gradients of all samples, and one update."""
        result = self._runner.run(samples, step=self.global_step + 1, upcoming=upcoming)
        with self._runner.committing("the optimizer step", last_checkpoint=self._checkpoints.last):
            grad_norm = self._optimization.update(result.target_tokens)
        self.global_step += 1
        learning_rate = self._optimization.learning_rate()
        self._metrics.log_step(
            self.global_step, result, self._runner.recoveries, learning_rate=learning_rate, grad_norm=grad_norm
        )
        self._profiler.step()

    def _save_checkpoint(self, epoch: int) -> None:
        """Collective: weights of this epoch, and what is needed to go on."""
        self._checkpoints.save(
            epoch, self._model, self._optimization.checkpointed, self.progress, self._data.loader.state_dict()
        )
