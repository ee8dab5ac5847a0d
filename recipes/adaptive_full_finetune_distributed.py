"""Full finetuning with FSDP2 on one or many devices, with microbatches that adapt to their memory.

    tune run --nproc_per_node 4 adaptive_full_finetune_distributed --config llama3_2/1B_full

Takes every config of torchtune's full_finetune_distributed unchanged.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from omegaconf import DictConfig
from torch import nn

from torchtune_adaptive.config import read_adaptive
from torchtune_adaptive.host import components, devices, launch, process_group
from torchtune_adaptive.host.batch_search import rows_that_fit, training_step
from torchtune_adaptive.host.checkpoints import FullCheckpoints
from torchtune_adaptive.host.data import build_data
from torchtune_adaptive.host.loss import build_loss
from torchtune_adaptive.host.memory_limit import limited_memory, resident_tensors
from torchtune_adaptive.host.metrics import Metrics
from torchtune_adaptive.host.microbatch import Sample, build_step_runner
from torchtune_adaptive.host.model import build_full_model
from torchtune_adaptive.host.optimization import build_optimization
from torchtune_adaptive.host.profiling import build_profiler
from torchtune_adaptive.host.progress import start_progress
from torchtune_adaptive.host.run_plan import announce, build_increase_function, plan_epochs
from torchtune_adaptive.host.settings import read_full_settings
from torchtune_adaptive.host.token_budget import check_token_budget, microbatches_of
from torchtune_adaptive.host.worst_case import worst_sample
from torchtune_adaptive.memory import MemorySource
from torchtune_adaptive.probe import TrainingStep
from torchtune_adaptive.schedules import EpochPlan, total_steps


class AdaptiveFullFinetuneDistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self._settings = read_full_settings(cfg)
        self._adaptive = read_adaptive(cfg.get("adaptive"))
        check_token_budget(self._settings, self._adaptive)
        self._device = devices.device_of(self._settings)
        process_group.join(self._device)
        self._mesh = process_group.data_and_tensor_mesh(self._device, self._settings.tensor_parallel_dim)
        self._checkpoints = FullCheckpoints(cfg, self._settings)
        self._ranks = self._mesh["dp"].size()
        self.progress = start_progress(self._settings, self._ranks)
        self.global_step = 0

    def setup(self) -> None:
        cfg, settings, device, mesh = self._cfg, self._settings, self._device, self._mesh
        devices.prepare(settings)
        self._metrics = Metrics(cfg, settings, device)

        checkpoint = self._checkpoints.load()
        self._model = build_full_model(cfg, settings, device, mesh, checkpoint)
        tokenizer = components.build("tokenizer", cfg)
        self._optimization = build_optimization(cfg, settings, self._model, checkpoint, device)
        if settings.resume_from_checkpoint:
            checkpoint = self._checkpoints.resume(checkpoint, self._model, self._optimization.checkpointed)
            self.progress = self.progress.resumed(checkpoint)
        loss_fn = build_loss(cfg, settings, self._model)

        self._data = build_data(cfg, settings, tokenizer, loss_fn, mesh)
        self._runner = build_step_runner(self._model, loss_fn, self._data.collate, settings, self._adaptive, device)
        self._plans = self._plan_epochs(tokenizer, loss_fn)
        self.global_step = total_steps(self._plans[: self.progress.epochs_run])
        self._optimization.start_schedule(
            total_steps=total_steps(self._plans),
            steps_done=self.global_step,
            lr_factor=self.progress.past[-1].lr_factor if self.progress.past else 1.0,
        )
        self._profiler = build_profiler(cfg, device)

    def _plan_epochs(self, tokenizer: Any, loss_fn: nn.Module) -> tuple[EpochPlan, ...]:
        """What every epoch does, with microbatches of the configured rows or of as many as fit."""
        cfg, settings, adaptive, loader = self._cfg, self._settings, self._adaptive, self._data.loader

        def worst_step() -> TrainingStep[Sample]:
            sample = worst_sample(cfg, self._data, tokenizer, adaptive.sequence_length)
            return training_step(self._runner, self._optimization, loss_fn, sample)

        with self._limited_memory() as memory:
            rows = rows_that_fit(cfg, settings, adaptive, memory, worst_step, loader.samples_per_rank)
            self._microbatches = microbatches_of(cfg, settings, adaptive, memory, worst_step, self._data)
        increase = build_increase_function(cfg)
        plans = plan_epochs(settings, adaptive, increase, rows, self.progress, loader.samples_per_rank)
        announce(plans, settings, self.progress, self._ranks, self._microbatches.limit)
        return plans

    def _limited_memory(self) -> AbstractContextManager[MemorySource | None]:
        resident = resident_tensors(self._model, self._optimization.optimizers)
        return limited_memory(self._adaptive.memory_limit, self._device, resident)

    def train(self) -> None:
        devices.start_clean(self._device)
        self._profiler.start()
        with self._limited_memory():
            for plan in self._plans[self.progress.epochs_run :]:
                self._train_epoch(plan)
        self._profiler.stop()

    def _train_epoch(self, plan: EpochPlan) -> None:
        self._runner.use_limit(self._microbatches.limit_of(plan))
        self._optimization.use_lr_factor(plan.lr_factor)
        steps = self._microbatches.steps(self._data.loader, plan)
        for samples, upcoming in self._metrics.epoch(plan.epoch, steps, plan.steps):
            self._train_step(samples, upcoming)
        self.progress = self.progress.after_epoch(plan, self._ranks)
        self._save_checkpoint(plan.epoch)

    def _train_step(self, samples: list[Sample], upcoming: list[Sample] | None) -> None:
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
        self._checkpoints.save(
            epoch, self._model, self._optimization.checkpointed, self.progress, self._data.loader.state_dict()
        )

    def cleanup(self) -> None:
        self._runner.close()
        self._metrics.close()
        process_group.leave()


if __name__ == "__main__":
    launch.main(AdaptiveFullFinetuneDistributed)
