"""PPO with FSDP2 on one or many devices: every stage of an iteration has microbatches that adapt to their memory.

    tune run --nproc_per_node 8 adaptive_ppo_full_finetune_distributed --config adaptive/mistral/7B_ppo

Accepts the keys of torchtune's ppo_full_finetune_single_device.
"""

from collections.abc import Sequence

from torchtune_adaptive.config import components
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.lifecycle.entry_point import DictConfig, run_recipe
from torchtune_adaptive.loop.training_loop import Run
from torchtune_adaptive.models.optimizer import Optimization
from torchtune_adaptive.rl.generation import Generate
from torchtune_adaptive.rl.iterations import Iterations
from torchtune_adaptive.rl.ppo import (
    PPO_CONTENTS,
    add_advantages,
    build_checkpointers,
    build_models,
    figures_of_update,
    ppo_stages,
)
from torchtune_adaptive.rl.rollouts import updates_of
from torchtune_adaptive.rl.settings import PPO_KEYS, REMEDIES_IN_PPO, read_ppo_settings
from torchtune_adaptive.rl.stages import TRAIN_POLICY, TRAIN_VALUE


class AdaptivePPOFullFinetuneDistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        settings, self._ppo = read_ppo_settings(cfg)
        self.run = Run(settings, PPO_CONTENTS, steps=self._ppo.iterations, build=build_checkpointers)

    def setup(self) -> None:
        """Collective: build model, optimizer and data, and find the batch size."""
        run, settings, ppo, devices = self.run, self.run.settings, self._ppo, self.run.devices
        weights = run.checkpoints.load()
        self.models = build_models(settings, devices, weights)
        optimization = Optimization(settings, self.models.trained, weights, devices.device)
        run.resume(weights)
        tokenizer = components.build("tokenizer", settings.config)
        generate = Generate(self.models.policy, tokenizer, settings, ppo, devices, run.progress.seed)
        stages = ppo_stages(self.models, generate, ppo, devices.device)
        self.iterations = Iterations(run, self.models.trained, optimization, tokenizer, stages, ppo)
        self.loop, self.stages = self.iterations.loop, self.iterations.runners

    def train(self) -> None:
        """Collective: run the remaining steps and save checkpoints."""
        with self.loop.training("iterations") as steps:
            for step in steps:
                self.iterations.finish(step.number, self.iterate(step.samples, step.number))

    def iterate(self, prompts: Sequence[Sample], number: int) -> dict[str, float]:
        """Collective: generate and score answers, update the models, and return the figures to log."""
        ppo, rollouts = self._ppo, self.iterations.generate_and_score(prompts, number)
        figures = add_advantages(rollouts, ppo)
        for own in updates_of(rollouts, ppo.ppo_batch_size, ppo.ppo_epochs, self.run.progress.seed):
            value = self.iterations.run_stage(TRAIN_VALUE, own, number)
            policy = self.iterations.run_stage(TRAIN_POLICY, own, number)
            summed_over = {"value": value.target_tokens, "policy": policy.target_tokens}
            self.iterations.update(summed_over, figures_of_update(value, policy, ppo.loss))
        return figures

    def cleanup(self) -> None:
        """Collective: finish saves and leave the process group."""
        self.loop.close()


if __name__ == "__main__":
    run_recipe(AdaptivePPOFullFinetuneDistributed, keys=PPO_KEYS, remedies=REMEDIES_IN_PPO)
