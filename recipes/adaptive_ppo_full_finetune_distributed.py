"""PPO with FSDP2 on one or many devices: every stage of an iteration has microbatches that adapt to their memory.

    tune run --nproc_per_node 8 adaptive_ppo_full_finetune_distributed --config adaptive/mistral/7B_ppo

Takes the keys of torchtune's ppo_full_finetune_single_device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from omegaconf import DictConfig
from torchtune import training

from torchtune_adaptive.config import components
from torchtune_adaptive.config.remedies import KEYS_IN_PPO
from torchtune_adaptive.life import launch
from torchtune_adaptive.rl.checkpoints import PPOContents, build_checkpointers
from torchtune_adaptive.rl.course import plan_iterations
from torchtune_adaptive.rl.figures import Updates, figures_of_run, figures_of_stages
from torchtune_adaptive.rl.generation import sampling_of
from torchtune_adaptive.rl.limits import check_room
from torchtune_adaptive.rl.models import build_models
from torchtune_adaptive.rl.ppo import build_ppo_loss, figures_of_update, keep_advantages, ppo_stages
from torchtune_adaptive.rl.rewards import build_rewards
from torchtune_adaptive.rl.rollouts import build_prompts, gathered, rollouts_of, updates_of
from torchtune_adaptive.rl.settings import PPO_KEYS, TRAINED_FILES, read_ppo_settings
from torchtune_adaptive.rl.stages import TRAIN_POLICY, TRAIN_VALUE, RolloutStages
from torchtune_adaptive.tune.optimizer import one_optimizer
from torchtune_adaptive.tune.samples import Sample
from torchtune_adaptive.tune.trainer import Run, Trainer


class AdaptivePPOFullFinetuneDistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        settings, self._ppo = read_ppo_settings(cfg)
        self.run = Run(settings, PPOContents(), steps=self._ppo.iterations, build=build_checkpointers)

    def setup(self) -> None:
        run, settings, ppo, place = self.run, self.run.settings, self._ppo, self.run.place
        weights = run.checkpoints.load()
        self.models = build_models(settings, place, weights, run.progress.seed)
        check_room(self.models.everything, settings.adaptive, ppo.max_generated_tokens)
        trained = self.models.trained
        self.optimization = one_optimizer(settings, trained, weights.get(training.OPT_KEY), place.device)
        run.resume(weights, trained, self.optimization, told={"seed": "seed"})
        self._loss, tokenizer = build_ppo_loss(settings), components.build("tokenizer", settings.config)
        self.data = build_prompts(settings, tokenizer, place.mesh)
        sampling = sampling_of(tokenizer, ppo, run.progress.seed)
        self.rewards = build_rewards(settings.config, ppo.reward_timeout, tokenizer, sampling.stop_tokens)
        stages = ppo_stages(self.models, self._loss, sampling, settings, ppo, place.device)
        self.stages, self.updates = RolloutStages(stages, settings, run.journal.event), Updates()
        self.trainer = Trainer(
            run,
            trained,
            self.data,
            self.optimization,
            self.stages.runners,
            limits=self.stages.state_dict,
            weights=TRAINED_FILES,
        )
        plan_iterations(self.trainer, self.stages, ppo)

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
        ppo, stages = self._ppo, self.stages
        stages.begin_iteration()
        rollouts = rollouts_of(prompts, iteration, ppo.max_generated_tokens)
        for stage in stages.before_training:
            stages.run(stage, rollouts, iteration)  # each adds its results to the rollouts
        self.rewards.score(prompts, rollouts)
        everyone = gathered(rollouts)
        if (every := self.run.settings.adaptive.show_answers) and iteration % every == 0:
            self.rewards.show(self.run.journal, everyone, 1, iteration)
        figures = self.rewards.figures(everyone) | keep_advantages(everyone, ppo)
        for share in updates_of(everyone, ppo.ppo_batch_size, ppo.ppo_epochs, self.run.progress.seed):
            value = stages.run(TRAIN_VALUE, share, iteration)
            policy = stages.run(TRAIN_POLICY, share, iteration)
            with stages.committing(last_checkpoint=self.run.checkpoints.last):
                grad_norm = self.optimization.update({"value": value.target_tokens, "policy": policy.target_tokens})
            self.updates.add(figures_of_update(value, policy, self._loss), grad_norm)
        learning_rate = {"lr": self.optimization.learning_rate()}
        return {**figures, **self.updates.means(), **learning_rate, **figures_of_stages(stages)}

    def cleanup(self) -> None:
        self.trainer.close()


if __name__ == "__main__":
    launch.main(AdaptivePPOFullFinetuneDistributed, keys=PPO_KEYS, remedies=KEYS_IN_PPO)
