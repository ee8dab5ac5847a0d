"""Preference training of adapters (DPO) with FSDP2 on one or many devices, with microbatches that adapt to memory.

    tune run --nproc_per_node 2 adaptive_lora_dpo_distributed --config llama3_1/8B_lora_dpo

Takes every config of torchtune's lora_dpo_distributed unchanged. The reference is the policy with its adapters off.
"""

from __future__ import annotations

from omegaconf import DictConfig

from torchtune_adaptive.checkpoints.contents import LoraContents
from torchtune_adaptive.checkpoints.progress import start_progress
from torchtune_adaptive.checkpoints.resuming import find_start
from torchtune_adaptive.checkpoints.saving import Checkpoints
from torchtune_adaptive.config import components
from torchtune_adaptive.config.checks import read_lora_dpo_settings
from torchtune_adaptive.life import launch
from torchtune_adaptive.tune import devices, process_group
from torchtune_adaptive.tune.course import Parts, begin_epoch, plot_course
from torchtune_adaptive.tune.data import build_pairs
from torchtune_adaptive.tune.loss_watch import LossWatch
from torchtune_adaptive.tune.metrics import Metrics
from torchtune_adaptive.tune.model import build_lora_model
from torchtune_adaptive.tune.optimizer import build_optimization
from torchtune_adaptive.tune.preference import (
    PAIRS,
    POLICY,
    REFERENCE,
    PreferenceFigures,
    build_preference_loss,
    build_stages,
)
from torchtune_adaptive.tune.profiling import build_profiler
from torchtune_adaptive.tune.reference import is_known, precompute_reference
from torchtune_adaptive.tune.run_journal import RunJournal


class AdaptiveLoraDPODistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        self._settings, self._lora = read_lora_dpo_settings(cfg)
        self._place = process_group.join(self._settings)
        self._start = find_start(self._settings, recipe="lora_dpo")
        contents = LoraContents(self._lora, self._settings.save_adapter_weights_only, recipe="lora_dpo")
        self.checkpoints = Checkpoints(self._settings, self._start, contents, self._place.device)
        self._preferences = PreferenceFigures(self._settings)
        self.progress = start_progress(self._settings, self._place.ranks)

    def setup(self) -> None:
        settings, place = self._settings, self._place
        devices.prepare(settings)
        journal = RunJournal(settings)
        metrics = Metrics(settings, place.device, journal)

        checkpoint = self.checkpoints.load()
        self.model = build_lora_model(settings, self._lora, place, checkpoint)
        tokenizer = components.build("tokenizer", settings.config)
        self.optimization = build_optimization(settings, self.model, checkpoint, place.device)
        if self._start.resumes:
            checkpoint = self.checkpoints.resume(checkpoint, self.model, self.optimization.checkpointed)
            self.progress = self.progress.resumed(checkpoint)
        loss_fn = build_preference_loss(settings.config)

        self.data = build_pairs(settings, tokenizer, place.mesh)
        reference = None if is_known(settings, self.data.dataset) else self.model
        self.stages = build_stages(self.model, reference, loss_fn, self.data, settings, place.device, journal.event)
        self._profiler = build_profiler(settings.config, place.device)
        self.parts = Parts(
            settings=settings,
            place=place,
            model=self.model,
            loss_fn=loss_fn,
            data=self.data,
            optimization=self.optimization,
            stages=self.stages,
            checkpoints=self.checkpoints,
            metrics=metrics,
            journal=journal,
        )
        if settings.adaptive.precompute_reference and REFERENCE in self.stages:
            precompute_reference(self.parts, self.progress)
        self.course, self.progress = plot_course(self.parts, self.progress)

    def train(self) -> None:
        devices.start_clean(self._place.device)
        losses, stopping = LossWatch(self._settings.adaptive.max_skipped_steps), False
        self._profiler.start()
        with self.parts.training(suspects=self.course.suspects):
            for sizes in self.course.epochs[self.progress.epochs_run :]:
                steps = begin_epoch(self.parts, self.course, self.progress, sizes)
                for samples, upcoming in self.parts.metrics.epoch(sizes, steps, self.progress.steps_in_epoch):
                    # What the reference says of a pair is kept in it, for the stage that follows.
                    pairs, step = [dict(sample) for sample in samples], self.progress.step + 1
                    results = self.stages.run(pairs, step=step, upcoming=upcoming)
                    result = results[POLICY]
                    with self.stages[POLICY].committing("the optimizer step", last_checkpoint=self.checkpoints.last):
                        grad_norm = self.optimization.update(result.sums[PAIRS])
                    self.progress = self.progress.after_step(sizes, self._place.ranks)
                    loss = self.parts.metrics.log_step(
                        step,
                        result,
                        self.stages.recoveries,
                        learning_rate=self.optimization.learning_rate(),
                        grad_norm=grad_norm,
                        samples=float(result.sums[PAIRS]),
                        more=self._preferences.figures(results),
                    )
                    losses.record(step, loss, result.target_tokens, grad_norm)
                    self._profiler.step()
                    stopping = result.asked_to_stop
                    self.parts.save_if_due(self.progress, losses, asked_to_stop=stopping)
                self._preferences.end_epoch()
                self.progress = self.progress.after_epoch(sizes)
                self.parts.save_epoch(self.progress, losses, asked_to_stop=stopping)
        self._profiler.stop()

    def cleanup(self) -> None:
        self.parts.close()
        self._start.release()
        process_group.leave()


if __name__ == "__main__":
    launch.main(AdaptiveLoraDPODistributed)
