"""GRPO with FSDP2 on one or many devices: every stage of an iteration has microbatches that adapt to their memory.

    tune run --nproc_per_node 8 adaptive_grpo_full_finetune_distributed --config adaptive/llama3_2/3B_grpo

Takes the keys of torchtune's recipes/dev/grpo_full_finetune_distributed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from omegaconf import DictConfig

from torchtune_adaptive.checkpoints.saving import FullContents
from torchtune_adaptive.config import components
from torchtune_adaptive.config.remedies import KEYS_IN_PPO
from torchtune_adaptive.life import launch
from torchtune_adaptive.rl.course import plan_iterations
from torchtune_adaptive.rl.figures import Updates, figures_of_run, figures_of_stages
from torchtune_adaptive.rl.generation import sampling_of
from torchtune_adaptive.rl.grpo import (
    GRPO_KEYS,
    build_policies,
    figures_of_update,
    grpo_stages,
    prepared,
    read_grpo_settings,
)
from torchtune_adaptive.rl.limits import check_room
from torchtune_adaptive.rl.rewards import build_rewards
from torchtune_adaptive.rl.rollouts import build_prompts, gathered, rollouts_of, updates_of
from torchtune_adaptive.rl.stages import TRAIN_POLICY, RolloutStages
from torchtune_adaptive.tune.optimizer import build_optimization
from torchtune_adaptive.tune.samples import Sample
from torchtune_adaptive.tune.trainer import Run, Trainer


class AdaptiveGRPOFullFinetuneDistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        settings, (self._grpo, self._loss) = read_grpo_settings(cfg)
        self.run = Run(settings, FullContents(recipe="full_grpo"), steps=self._grpo.iterations)

    def setup(self) -> None:
        run, settings, grpo, place = self.run, self.run.settings, self._grpo, self.run.place
        weights = run.checkpoints.load()
        self.policy, reference = build_policies(settings, place, weights, self._loss)
        check_room([self.policy], settings.adaptive, grpo.max_generated_tokens)
        self.optimization = build_optimization(settings, self.policy, weights, place.device)
        run.resume(weights, self.policy, self.optimization)
        tokenizer = components.build("tokenizer", settings.config)
        data = build_prompts(settings, tokenizer, place.mesh)
        sampling = sampling_of(tokenizer, grpo, run.progress.seed)
        self.rewards = build_rewards(settings.config, grpo.reward_timeout, tokenizer, sampling.stop_tokens)
        stages = grpo_stages(self.policy, reference, self._loss, sampling, settings, grpo, place.device)
        self.stages, self.updates = RolloutStages(stages, settings, run.journal.event), Updates()
        runners, limits = self.stages.runners, self.stages.state_dict
        self.trainer = Trainer(run, self.policy, data, self.optimization, runners, limits=limits)
        plan_iterations(self.trainer, self.stages, grpo)

    def train(self) -> None:
        with self.trainer.training("iterations") as steps:
            for step in steps:
                began = time.perf_counter()
                figures = self.iterate(step.samples, step.number)
                run = figures_of_run(self.stages, began, self._grpo.answers * self.run.place.ranks)
                self.run.metrics.log_iteration(step.number, figures, run)
                loss, norm, tokens = figures["loss"], figures.get("grad_norm"), int(run["target_tokens"])
                self.trainer.logged(loss, tokens, norm, asked_to_stop=self.stages.asked_to_stop)

    def iterate(self, prompts: Sequence[Sample], iteration: int) -> dict[str, float]:
        """Collective: answers to prompts, what they are worth, and the updates that follow. Returns what is logged."""
        grpo, stages = self._grpo, self.stages
        stages.begin_iteration()
        rollouts = rollouts_of(prompts, iteration, grpo.max_generated_tokens, answers=grpo.grpo_samples)
        for stage in stages.before_training:
            stages.run(stage, rollouts, iteration)  # each adds its results to the rollouts
        self.rewards.score(prompts, rollouts)
        everyone = gathered(rollouts)
        if (every := self.run.settings.adaptive.show_answers) and iteration % every == 0:
            self.rewards.show(self.run.journal, everyone, grpo.grpo_samples, iteration)
        batch = prepared(everyone, grpo, self._loss)
        share_size = len(batch.rollouts) // self.run.place.ranks
        for share in updates_of(batch.rollouts, share_size, grpo.ppo_epochs, self.run.progress.seed):
            policy = stages.run(TRAIN_POLICY, share, iteration)
            with stages.committing(last_checkpoint=self.run.checkpoints.last):
                grad_norm = self.optimization.update(batch.divisor)
            self.updates.add(figures_of_update(policy, batch.divisor), grad_norm)
        return {
            **batch.figures,
            **self.rewards.figures(everyone),
            **self.updates.means(),
            "lr": self.optimization.learning_rate(),
            **figures_of_stages(stages),
        }

    def cleanup(self) -> None:
        self.trainer.close()


if __name__ == "__main__":
    launch.main(AdaptiveGRPOFullFinetuneDistributed, keys=GRPO_KEYS, remedies=KEYS_IN_PPO)
