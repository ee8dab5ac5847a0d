"""Preference training (DPO) with FSDP2 on one or many devices, with microbatches that adapt to their memory.

    tune run --nproc_per_node 4 adaptive_full_dpo_distributed --config llama3_1/8B_full_dpo

Accepts every config of torchtune's full_dpo_distributed unchanged.
"""

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.config import components
from torchtune_adaptive.config.checks import ONLY_FOR_FULL_FINETUNING, read_full_settings
from torchtune_adaptive.data.loading import build_data
from torchtune_adaptive.data.samples import PAIR
from torchtune_adaptive.lifecycle.entry_point import DictConfig, run_recipe
from torchtune_adaptive.loop.batch_size import set_batch_sizes
from torchtune_adaptive.loop.training_loop import Run, TrainingLoop
from torchtune_adaptive.models.optimizer import Optimization
from torchtune_adaptive.objectives.preference import PAIRS, POLICY, Passes, build_dpo_models, figures_of
from torchtune_adaptive.objectives.stages import build_stages
from torchtune_adaptive.objectives.validation import build_validation


class AdaptiveFullDPODistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        settings = read_full_settings(cfg, "preference training", ONLY_FOR_FULL_FINETUNING)
        self.run = Run(settings, Contents("full_dpo"))

    def setup(self) -> None:
        """Collective: build model, optimizer and data, and find the batch size."""
        run, settings, devices = self.run, self.run.settings, self.run.devices
        weights = run.checkpoints.load()
        self.model, reference = build_dpo_models(
            settings, devices, weights, with_adapters=run.contents.lora is not None
        )
        self.optimization = Optimization(settings, self.model, weights, devices.device)
        run.resume(weights)
        loss_fn = components.build("loss", settings.config)
        tokenizer = components.build("tokenizer", settings.config)
        self.data = build_data(settings, tokenizer, devices.mesh, PAIR)
        passes = Passes(self.model, reference, loss_fn, self.data, settings, devices.device)
        self.stages = build_stages(passes.on_training_data, self.data, settings, devices.device, run.journal.event)
        validation = build_validation(
            passes.on_validation_data, settings, self.data, self.stages, tokenizer, devices.mesh
        )
        self.loop = TrainingLoop(
            run, self.model, self.data, self.optimization, self.stages, loss_fn=loss_fn, validation=validation
        )
        set_batch_sizes(self.loop)

    def train(self) -> None:
        """Collective: run the remaining steps and save checkpoints."""
        policy = self.stages[POLICY]
        with self.loop.training() as steps:
            for step in steps:
                pairs = [dict(pair) for pair in step.samples]  # copies, in which the reference stage stores its results
                results = self.stages.run(pairs, step=step.number, upcoming=step.upcoming)
                count = results[POLICY].sums[PAIRS]
                with policy.committing("the optimizer step", last_checkpoint=self.run.checkpoints.last):
                    grad_norm = self.optimization.update(count)
                self.loop.finish_step(results[POLICY], grad_norm, samples=float(count), more=figures_of(results))

    def cleanup(self) -> None:
        """Collective: finish saves and leave the process group."""
        self.loop.close()


if __name__ == "__main__":
    run_recipe(AdaptiveFullDPODistributed)
