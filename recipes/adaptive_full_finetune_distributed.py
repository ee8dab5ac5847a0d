"""Full finetuning with FSDP2 on one or many devices, with microbatches that adapt to their memory.

    tune run --nproc_per_node 4 adaptive_full_finetune_distributed --config llama3_2/1B_full

Takes every config of torchtune's full_finetune_distributed unchanged.
"""

from __future__ import annotations

from omegaconf import DictConfig

from torchtune_adaptive.tune.parts import devices, process_group
from torchtune_adaptive.tune.parts.checkpoints import FullCheckpoints
from torchtune_adaptive.tune.parts.data import build_data
from torchtune_adaptive.tune.parts.loss import build_loss
from torchtune_adaptive.tune.parts.microbatch import build_step_runner
from torchtune_adaptive.tune.parts.model import build_full_model
from torchtune_adaptive.tune.parts.optimization import build_optimization
from torchtune_adaptive.tune.parts.profiling import build_profiler
from torchtune_adaptive.tune.run.finetuning import Finetuning
from torchtune_adaptive.tune.run.journal import RunJournal
from torchtune_adaptive.tune.run.metrics import Metrics
from torchtune_adaptive.tune.run.progress import start_progress
from torchtune_adaptive.tune.run.token_budget import check_token_budget
from torchtune_adaptive.tune.start import components, launch
from torchtune_adaptive.tune.start.sections import read_adaptive
from torchtune_adaptive.tune.start.settings import read_full_settings


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
        self._progress = start_progress(self._settings, self._ranks)

    def setup(self) -> None:
        cfg, settings, device, mesh = self._cfg, self._settings, self._device, self._mesh
        devices.prepare(settings)
        journal = RunJournal(settings)
        metrics = Metrics(cfg, settings, device, journal)

        checkpoint = self._checkpoints.load()
        model = build_full_model(cfg, settings, device, mesh, checkpoint)
        tokenizer = components.build("tokenizer", cfg)
        optimization = build_optimization(cfg, settings, model, checkpoint, device)
        if settings.resume_from_checkpoint:
            checkpoint = self._checkpoints.resume(checkpoint, model, optimization.checkpointed)
            self._progress = self._progress.resumed(checkpoint)
        loss_fn = build_loss(cfg, settings, model)

        data = build_data(cfg, settings, tokenizer, loss_fn, mesh)
        runner = build_step_runner(model, loss_fn, data.collate, settings, self._adaptive, device, journal.event)
        self.training = Finetuning(
            cfg=cfg,
            settings=settings,
            adaptive=self._adaptive,
            device=device,
            ranks=self._ranks,
            checkpoints=self._checkpoints,
            model=model,
            optimization=optimization,
            data=data,
            runner=runner,
            metrics=metrics,
            journal=journal,
            profiler=build_profiler(cfg, device),
            progress=self._progress,
        )
        self.training.plan(tokenizer, loss_fn)

    def train(self) -> None:
        devices.start_clean(self._device)
        self.training.train()

    def cleanup(self) -> None:
        self.training.close()
        process_group.leave()


if __name__ == "__main__":
    launch.main(AdaptiveFullFinetuneDistributed)
