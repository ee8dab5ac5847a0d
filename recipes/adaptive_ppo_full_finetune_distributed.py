"""PPO with FSDP2 on one or many devices: every stage of an iteration has microbatches that adapt to their memory.

    tune run --nproc_per_node 8 adaptive_ppo_full_finetune_distributed --config adaptive/mistral/7B_ppo

Takes the keys of torchtune's ppo_full_finetune_single_device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from omegaconf import DictConfig

from torchtune_adaptive.config import components
from torchtune_adaptive.config.remedies import KEYS_IN_PPO
from torchtune_adaptive.life import launch
from torchtune_adaptive.rl.checkpoints import PPOContents, build_checkpointers
from torchtune_adaptive.rl.components import build_ppo_loss, build_prompts
from torchtune_adaptive.rl.course import RolloutParts, plot_epochs, start_schedules
from torchtune_adaptive.rl.experience import estimate
from torchtune_adaptive.rl.figures import Updates, figures_of_run, figures_of_stages
from torchtune_adaptive.rl.models import build_models, build_ppo_optimization
from torchtune_adaptive.rl.prompt_room import check_room
from torchtune_adaptive.rl.rollouts import gathered, rollouts_of, updates_of
from torchtune_adaptive.rl.settings import PPO_KEYS, TRAINED_FILES, read_ppo_settings
from torchtune_adaptive.rl.stage_limits import find_limits
from torchtune_adaptive.rl.stages import TRAIN_POLICY, TRAIN_VALUE, build_stages, sampling_of
from torchtune_adaptive.tune.samples import Sample
from torchtune_adaptive.tune.trainer import Course, Run, Trainer


class AdaptivePPOFullFinetuneDistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        settings, self._ppo = read_ppo_settings(cfg)
        self.run = Run(settings, PPOContents(), steps=self._ppo.iterations, build=build_checkpointers)

    def setup(self) -> None:
        run, settings, ppo, place = self.run, self.run.settings, self._ppo, self.run.place
        weights, seed = run.checkpoints.load(), run.progress.seed
        self.models = build_models(settings, place, weights, seed)
        check_room(self.models.everything, settings.adaptive, ppo)
        tokenizer = components.build("tokenizer", settings.config)
        self.optimization = build_ppo_optimization(settings, self.models, weights, place.device)
        run.resume(weights, self.models.trained, self.optimization, told={"seed": "seed"})
        self.loss = build_ppo_loss(settings)
        self.data = build_prompts(settings, tokenizer, place.mesh)
        self.sampling = sampling_of(tokenizer, ppo, run.progress.seed)
        self.stages = build_stages(
            self.models, self.loss, self.sampling, settings, ppo, place.device, run.journal.event
        )
        self.trainer = Trainer(
            run,
            self.models.trained,
            self.data,
            self.optimization,
            self.stages.runners,
            limits=self.stages.state_dict,
            weights=TRAINED_FILES,
        )
        parts = RolloutParts(trainer=self.trainer, ppo=ppo, models=self.models, rollout_stages=self.stages)
        epochs = plot_epochs(parts)
        run.journal.start(run.progress.step)
        with self.trainer.limited_memory() as memory, self.data.naming_bad_samples(self.models.policy, last=1):
            found = find_limits(parts, memory)
        self.stages.runners.use_limits(found.limits)
        run.checkpoints.make_room()
        self.trainer.course = Course(epochs=epochs, limits=found.limits, admission=found.admission)
        start_schedules(parts)

    def train(self) -> None:
        with self.trainer.training("iterations") as steps:
            for step in steps:
                began = time.perf_counter()
                figures = self.iterate(step.samples, step.number)
                run = figures_of_run(self.stages, began, len(step.samples) * self.run.place.ranks)
                self.run.metrics.log_iteration(step.number, figures, run)
                loss, norm, tokens = figures["loss"], figures.get("grad_norm"), int(run["target_tokens"])
                self.trainer.logged(loss, tokens, norm, asked_to_stop=self.stages.asked_to_stop)

    def iterate(self, prompts: Sequence[Sample], iteration: int) -> dict[str, float]:
        """Collective: answers to prompts, what they are worth, and the updates that follow. Returns what is logged."""
        # What a stage finds for a rollout is kept in it, for the stages that follow.
        mine = rollouts_of(prompts, iteration, self._ppo.max_generated_tokens)
        self.stages.roll_out(mine, iteration)
        # Advantages are whitened over the answers of all ranks, before anything is split.
        everything = gathered(mine)
        figures = estimate(everything, self._ppo, self.sampling.stop_tokens)
        updates = Updates(self.loss)
        for share in updates_of(everything, self._ppo, self.run.progress.seed, iteration):
            value = self.stages.run(TRAIN_VALUE, share, iteration)
            policy = self.stages.run(TRAIN_POLICY, share, iteration)
            tokens = {"value": value.target_tokens, "policy": policy.target_tokens}
            with self.stages.committing(last_checkpoint=self.run.checkpoints.last):
                grad_norm = self.optimization.update(tokens)
            updates.add(value, policy, grad_norm)
        figures |= {**updates.means(), "lr": self.optimization.learning_rate()}
        return figures | figures_of_stages(self.stages)

    def cleanup(self) -> None:
        self.trainer.close()


if __name__ == "__main__":
    launch.main(AdaptivePPOFullFinetuneDistributed, keys=PPO_KEYS, remedies=KEYS_IN_PPO)
