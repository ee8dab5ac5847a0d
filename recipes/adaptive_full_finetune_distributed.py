"""Full finetuning with FSDP2 on one or many devices, with microbatches that adapt to their memory.

    tune run --nproc_per_node 4 adaptive_full_finetune_distributed --config llama3_2/1B_full

Takes every config of torchtune's full_finetune_distributed unchanged.
"""

from __future__ import annotations

from omegaconf import DictConfig

from torchtune_adaptive.config import read_adaptive
from torchtune_adaptive.host import components, devices, launch, process_group
from torchtune_adaptive.host.checkpoints import FullCheckpoints
from torchtune_adaptive.host.data import build_data
from torchtune_adaptive.host.finetuning import Finetuning
from torchtune_adaptive.host.journal import RunJournal
from torchtune_adaptive.host.loss import build_loss
from torchtune_adaptive.host.metrics import Metrics
from torchtune_adaptive.host.microbatch import build_step_runner
from torchtune_adaptive.host.model import build_full_model
from torchtune_adaptive.host.optimization import build_optimization
from torchtune_adaptive.host.profiling import build_profiler
from torchtune_adaptive.host.progress import start_progress
from torchtune_adaptive.host.settings import read_full_settings
from torchtune_adaptive.host.token_budget import check_token_budget


class AdaptiveFullFinetuneDistributed(Finetuning):
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
        self._journal = RunJournal(settings)
        self._metrics = Metrics(cfg, settings, device, self._journal)

        checkpoint = self._checkpoints.load()
        self._model = build_full_model(cfg, settings, device, mesh, checkpoint)
        tokenizer = components.build("tokenizer", cfg)
        self._optimization = build_optimization(cfg, settings, self._model, checkpoint, device)
        if settings.resume_from_checkpoint:
            checkpoint = self._checkpoints.resume(checkpoint, self._model, self._optimization.checkpointed)
            self.progress = self.progress.resumed(checkpoint)
        loss_fn = build_loss(cfg, settings, self._model)

        self._data = build_data(cfg, settings, tokenizer, loss_fn, mesh)
        self._runner = build_step_runner(
            self._model, loss_fn, self._data.collate, settings, self._adaptive, device, self._journal.event
        )
        self._start_schedules(self._plan_epochs(tokenizer, loss_fn))
        self._profiler = build_profiler(cfg, device)

    def train(self) -> None:
        devices.start_clean(self._device)
        self._profiler.start()
        with self._limited_memory() as memory:
            self._watch(memory)
            for plan in self._plans[self.progress.epochs_run :]:
                self._train_epoch(plan)
        self._profiler.stop()

    def cleanup(self) -> None:
        self._runner.close()
        self._metrics.close()
        self._journal.draw()
        process_group.leave()


if __name__ == "__main__":
    launch.main(AdaptiveFullFinetuneDistributed)
