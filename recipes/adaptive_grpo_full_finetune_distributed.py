"""GRPO with FSDP2 on one or many devices: every stage of an iteration has microbatches that adapt to their memory.

    tune run --nproc_per_node 8 adaptive_grpo_full_finetune_distributed --config adaptive/llama3_2/3B_grpo

Accepts the keys of torchtune's recipes/dev/grpo_full_finetune_distributed.
"""

from collections.abc import Sequence

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.config.remedies import KEYS_IN_PPO
from torchtune_adaptive.lifecycle.entry_point import DictConfig, run_recipe
from torchtune_adaptive.rl.generation import Generate
from torchtune_adaptive.rl.grpo import (
    add_advantages,
    build_policy,
    figures_of_update,
    grpo_stages,
)
from torchtune_adaptive.rl.iterations import Iterations
from torchtune_adaptive.rl.rollouts import updates_of
from torchtune_adaptive.rl.settings import GRPO_KEYS, GRPOSettings, read_grpo_settings
from torchtune_adaptive.rl.stages import TRAIN_POLICY
from torchtune_adaptive.tune.optimizer import build_optimization
from torchtune_adaptive.tune.samples import Sample
from torchtune_adaptive.tune.training_loop import Run


class AdaptiveGRPOFullFinetuneDistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        self.begin(*read_grpo_settings(cfg), Contents("full_grpo"))

    def begin(self, settings: Settings, grpo: GRPOSettings, contents: Contents) -> None:
        """Collective: create the run, with the contents of its checkpoints."""
        self.run, self._grpo = Run(settings, contents, steps=grpo.iterations), grpo

    def setup(self) -> None:
        """Collective: build model, optimizer and data, and find the batch size."""
        run, settings, grpo, devices = self.run, self.run.settings, self._grpo, self.run.devices
        weights = run.checkpoints.load()
        policy = build_policy(settings, grpo, devices, weights)
        optimization = build_optimization(settings, policy, weights, devices.device)
        run.resume(weights)
        tokenizer = components.build("tokenizer", settings.config)
        generate = Generate(policy, tokenizer, settings, grpo, devices, run.progress.seed)
        stages = grpo_stages(policy, generate, settings, grpo, devices)
        self.iterations = Iterations(run, policy, optimization, tokenizer, stages, grpo)
        self.loop, self.stages = self.iterations.loop, self.iterations.stages

    def train(self) -> None:
        """Collective: run the remaining steps and save checkpoints."""
        with self.loop.training("iterations") as steps:
            for step in steps:
                self.iterations.finish(step.number, self.iterate(step.samples, step.number))

    def iterate(self, prompts: Sequence[Sample], number: int) -> dict[str, float]:
        """Collective: generate and score answers, update the models, and return the figures to log."""
        grpo, rollouts = self._grpo, self.iterations.generate_and_score(prompts, number)
        divisor, figures = add_advantages(rollouts, grpo)
        for own in updates_of(rollouts, grpo.answers, grpo.ppo_epochs, self.run.progress.seed):
            policy = self.stages.run_stage(TRAIN_POLICY, own, number)
            self.iterations.update(divisor, figures_of_update(policy, divisor))
        return figures

    def cleanup(self) -> None:
        """Collective: finish saves and leave the process group."""
        self.loop.close()


if __name__ == "__main__":
    run_recipe(AdaptiveGRPOFullFinetuneDistributed, keys=GRPO_KEYS, remedies=KEYS_IN_PPO)
