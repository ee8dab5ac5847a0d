"""PPO with FSDP2 on one or many devices: every stage of an iteration has microbatches that adapt to their memory.

    tune run --nproc_per_node 8 adaptive_ppo_full_finetune_distributed --config adaptive/mistral/7B_ppo

Takes the keys of torchtune's ppo_full_finetune_single_device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from omegaconf import DictConfig

from torchtune_adaptive.checkpoints.progress import start_progress
from torchtune_adaptive.checkpoints.resuming import find_start
from torchtune_adaptive.checkpoints.saving import Checkpoints
from torchtune_adaptive.config import components
from torchtune_adaptive.config.remedies import KEYS_IN_PPO
from torchtune_adaptive.life import launch
from torchtune_adaptive.rl.checkpoints import PPOContents, build_checkpointers
from torchtune_adaptive.rl.components import build_ppo_loss, build_prompts
from torchtune_adaptive.rl.course import RolloutParts, begin_epoch, plot_epochs, start_schedules
from torchtune_adaptive.rl.experience import estimate
from torchtune_adaptive.rl.figures import Updates, figures_of_run, figures_of_stages
from torchtune_adaptive.rl.models import build_models, build_ppo_optimization
from torchtune_adaptive.rl.prompt_room import check_room
from torchtune_adaptive.rl.rollouts import gathered, rollouts_of, updates_of
from torchtune_adaptive.rl.settings import PPO_KEYS, TRAINED_FILES, read_ppo_settings
from torchtune_adaptive.rl.stage_limits import find_limits
from torchtune_adaptive.rl.stages import TRAIN_POLICY, TRAIN_VALUE, build_stages, sampling_of
from torchtune_adaptive.tune import devices, process_group
from torchtune_adaptive.tune.loss_watch import LossWatch
from torchtune_adaptive.tune.metrics import Metrics
from torchtune_adaptive.tune.profiling import build_profiler
from torchtune_adaptive.tune.run_journal import RunJournal
from torchtune_adaptive.tune.samples import Sample


class AdaptivePPOFullFinetuneDistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        self._settings, self._ppo = read_ppo_settings(cfg)
        self._place = process_group.join(self._settings)
        self._start = find_start(self._settings, recipe="full_ppo", steps=self._ppo.iterations)
        contents, device = PPOContents(), self._place.device
        self.checkpoints = Checkpoints(self._settings, self._start, contents, device, build_checkpointers)
        self.progress = start_progress(self._settings, self._place.ranks)

    def setup(self) -> None:
        settings, ppo, device = self._settings, self._ppo, self._place.device
        devices.prepare(settings)
        journal = RunJournal(settings)
        metrics = Metrics(settings, device, journal)

        checkpoint = self.checkpoints.load()
        self.models = build_models(settings, self._place, checkpoint, self.progress.seed)
        check_room(self.models.everything, settings.adaptive, ppo)
        tokenizer = components.build("tokenizer", settings.config)
        self.optimization = build_ppo_optimization(settings, self.models, checkpoint, device)
        if self._start.resumes:
            self.progress = self.progress.resumed(checkpoint, told={"seed": "seed"})
        self.loss = build_ppo_loss(settings)
        self.data = build_prompts(settings, tokenizer, self._place.mesh)
        self.sampling = sampling_of(tokenizer, ppo, self.progress.seed)
        self.stages = build_stages(self.models, self.loss, self.sampling, settings, ppo, device, journal.event)
        self._profiler = build_profiler(settings.config, device)
        self.parts = RolloutParts(
            settings=settings,
            ppo=ppo,
            place=self._place,
            models=self.models,
            model=self.models.trained,
            data=self.data,
            optimization=self.optimization,
            stages=self.stages.runners,
            rollout_stages=self.stages,
            checkpoints=self.checkpoints,
            metrics=metrics,
            journal=journal,
        )
        self.epochs, self.progress = plot_epochs(self.parts, self.progress)
        journal.start(self.progress.step)
        with self.parts.limited_memory() as memory, self.data.naming_bad_samples(self.models.policy, last=1):
            self.stage_limits = find_limits(self.parts, memory)
        self.stages.runners.use_limits(self.stage_limits.limits)
        self.checkpoints.make_room()
        start_schedules(self.parts, self.progress)

    def train(self) -> None:
        devices.start_clean(self._place.device)
        losses, stopping = LossWatch(self._settings.adaptive.max_skipped_steps, TRAINED_FILES), False
        self._profiler.start()
        with self.parts.training(suspects=2 * self._settings.batch_size):
            for sizes in self.epochs[self.progress.epochs_run :]:
                steps = begin_epoch(self.parts, self.progress, sizes, self.stage_limits.admission)
                for prompts in self.parts.metrics.epoch(sizes, steps, self.progress.steps_in_epoch, "iterations"):
                    began, iteration = time.perf_counter(), self.progress.step + 1
                    figures = self.iterate(prompts, iteration)
                    self.progress = self.progress.after_step(sizes, self._place.ranks)
                    run = figures_of_run(self.stages, began, len(prompts) * self._place.ranks)
                    self.parts.metrics.log_iteration(iteration, figures, run)
                    losses.record(iteration, figures["loss"], run["target_tokens"], figures.get("grad_norm"))
                    self._profiler.step()
                    stopping = self.stages.asked_to_stop
                    self.parts.save_if_due(self.progress, losses, asked_to_stop=stopping)
                self.progress = self.progress.after_epoch(sizes)
                self.parts.save_epoch(self.progress, losses, asked_to_stop=stopping)
        self._profiler.stop()

    def iterate(self, prompts: Sequence[Sample], iteration: int) -> dict[str, float]:
        """Collective: answers to prompts, what they are worth, and the updates that follow. Returns what is logged."""
        # What a stage finds for a rollout is kept in it, for the stages that follow.
        mine = rollouts_of(prompts, iteration, self._ppo.max_generated_tokens)
        self.stages.roll_out(mine, iteration)
        # Advantages are whitened over the answers of all ranks, before anything is split.
        everything = gathered(mine)
        figures = estimate(everything, self._ppo, self.sampling.stop_tokens)
        updates = Updates(self.loss)
        for share in updates_of(everything, self._ppo, self.progress.seed, iteration):
            value = self.stages.run(TRAIN_VALUE, share, iteration)
            policy = self.stages.run(TRAIN_POLICY, share, iteration)
            tokens = {"value": value.target_tokens, "policy": policy.target_tokens}
            with self.stages.committing(last_checkpoint=self.checkpoints.last):
                grad_norm = self.optimization.update(tokens)
            updates.add(value, policy, grad_norm)
        figures |= {**updates.means(), "lr": self.optimization.learning_rate()}
        return figures | figures_of_stages(self.stages)

    def cleanup(self) -> None:
        self.parts.close()
        self._start.release()
        process_group.leave()


if __name__ == "__main__":
    launch.main(AdaptivePPOFullFinetuneDistributed, keys=PPO_KEYS, remedies=KEYS_IN_PPO)
