"""Full finetuning with FSDP2 on one or many devices, with microbatches that adapt to their memory.

    tune run --nproc_per_node 4 adaptive_full_finetune_distributed --config llama3_2/1B_full

Takes every config of torchtune's full_finetune_distributed unchanged.
"""

from __future__ import annotations

from omegaconf import DictConfig

from torchtune_adaptive.config import read_adaptive
from torchtune_adaptive.host import components, devices, launch, process_group
from torchtune_adaptive.host.checkpoints import FullCheckpoints
from torchtune_adaptive.host.data import build_collate, build_dataset, build_step_loader
from torchtune_adaptive.host.loss import build_loss
from torchtune_adaptive.host.metrics import Metrics
from torchtune_adaptive.host.microbatch import Sample, build_step_runner
from torchtune_adaptive.host.model import build_full_model
from torchtune_adaptive.host.optimization import build_optimization
from torchtune_adaptive.host.profiling import build_profiler
from torchtune_adaptive.host.progress import start_progress
from torchtune_adaptive.host.settings import read_settings


class AdaptiveFullFinetuneDistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self._settings = read_settings(cfg)
        self._adaptive = read_adaptive(cfg.get("adaptive"))
        self._device = devices.device_of(self._settings)
        process_group.join(self._device)
        self._mesh = process_group.data_and_tensor_mesh(self._device, self._settings.tensor_parallel_dim)
        self._checkpoints = FullCheckpoints(cfg, self._settings)
        self.progress = start_progress(self._settings)
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

        dataset, packed = build_dataset(cfg, tokenizer)
        self._loader = build_step_loader(dataset, settings, mesh)
        collate = build_collate(settings, tokenizer, loss_fn, packed=packed)
        self._steps_per_epoch = self.progress.steps_per_epoch(len(self._loader))
        self.global_step = self.progress.epochs_run * self._steps_per_epoch
        self._optimization.start_schedule(
            total_steps=self.progress.total_epochs * self._steps_per_epoch, steps_done=self.global_step
        )
        self._runner = build_step_runner(self._model, loss_fn, collate, settings, self._adaptive, device)
        self._profiler = build_profiler(cfg, device)
        self._metrics.announce(settings, self._steps_per_epoch, self.progress.total_epochs)

    def train(self) -> None:
        devices.start_clean(self._device)
        self._profiler.start()
        for epoch in range(self.progress.epochs_run, self.progress.total_epochs):
            steps = self._loader.epoch(epoch, self._steps_per_epoch)
            for samples in self._metrics.epoch(epoch, steps, self._steps_per_epoch):
                self._train_step(samples)
            self.progress = self.progress.after_epoch()
            self._save_checkpoint(epoch)
        self._profiler.stop()

    def _train_step(self, samples: list[Sample]) -> None:
        result = self._runner.run(samples, step=self.global_step + 1)
        with self._runner.committing("the optimizer step", last_checkpoint=self._checkpoints.last):
            grad_norm = self._optimization.update(result.target_tokens)
        self.global_step += 1
        learning_rate = self._optimization.learning_rate()
        self._metrics.log_step(self.global_step, result, self._runner, learning_rate=learning_rate, grad_norm=grad_norm)
        self._profiler.step()

    def _save_checkpoint(self, epoch: int) -> None:
        self._checkpoints.save(
            epoch, self._model, self._optimization.checkpointed, self.progress, self._loader.state_dict()
        )

    def cleanup(self) -> None:
        self._runner.close()
        self._metrics.close()
        process_group.leave()


if __name__ == "__main__":
    launch.main(AdaptiveFullFinetuneDistributed)
