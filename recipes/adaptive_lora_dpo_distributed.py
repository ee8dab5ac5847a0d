"""Preference training of adapters (DPO) with FSDP2 on one or many devices, with microbatches that adapt to memory.

    tune run --nproc_per_node 2 adaptive_lora_dpo_distributed --config llama3_1/8B_lora_dpo

Takes every config of torchtune's lora_dpo_distributed unchanged. The reference is the policy with its adapters off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.config import components
from torchtune_adaptive.config.checks import read_lora_settings
from torchtune_adaptive.lifecycle.entry_point import run_recipe
from torchtune_adaptive.tune.batch_size import set_batch_sizes
from torchtune_adaptive.tune.data import build_pairs
from torchtune_adaptive.tune.model import build_lora_model
from torchtune_adaptive.tune.optimizer import build_optimization
from torchtune_adaptive.tune.preference import PAIRS, POLICY, build_preference_loss, build_stages, figures_of
from torchtune_adaptive.tune.trainer import Run, Trainer

if TYPE_CHECKING:
    from omegaconf import DictConfig


class AdaptiveLoraDPODistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        settings, lora = read_lora_settings(cfg)
        self.run = Run(settings, Contents("lora_dpo", lora, settings.save_adapter_weights_only))

    def setup(self) -> None:
        """Collective: build model, optimizer and data, and find the batch size."""
        run, settings, place = self.run, self.run.settings, self.run.place
        weights = run.checkpoints.load()
        self.model = build_lora_model(settings, place, weights)
        self.optimization = build_optimization(settings, self.model, weights, place.device)
        run.resume(weights, self.model, self.optimization)
        loss_fn = build_preference_loss(settings.config)
        self.data = build_pairs(settings, components.build("tokenizer", settings.config), place.mesh)
        self.stages = build_stages(
            self.model, self.model, loss_fn, self.data, settings, place.device, run.journal.event
        )
        self.trainer = Trainer(run, self.model, self.data, self.optimization, self.stages, loss_fn=loss_fn)
        set_batch_sizes(self.trainer)

    def train(self) -> None:
        """Collective: run the remaining steps and save checkpoints."""
        policy = self.stages[POLICY]
        with self.trainer.training() as steps:
            for step in steps:
                pairs = [dict(pair) for pair in step.samples]  # the reference stage stores its results in them
                results = self.stages.run(pairs, step=step.number, upcoming=step.upcoming)
                count = results[POLICY].sums[PAIRS]
                with policy.committing("the optimizer step", last_checkpoint=self.run.checkpoints.last):
                    grad_norm = self.optimization.update(count)
                self.trainer.done(results[POLICY], grad_norm, samples=float(count), more=figures_of(results))

    def cleanup(self) -> None:
        """Collective: finish saves and leave the process group."""
        self.trainer.close()


if __name__ == "__main__":
    run_recipe(AdaptiveLoraDPODistributed)
