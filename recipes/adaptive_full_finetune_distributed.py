"""Full finetuning with FSDP2 on one or many devices, with microbatches that adapt to their memory.

    tune run --nproc_per_node 4 adaptive_full_finetune_distributed --config llama3_2/1B_full

Accepts every config of torchtune's full_finetune_distributed unchanged.
"""

from dataclasses import replace

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.config import components
from torchtune_adaptive.config.checks import read_full_settings
from torchtune_adaptive.data.loading import build_data
from torchtune_adaptive.data.samples import TEXT
from torchtune_adaptive.lifecycle.entry_point import DictConfig, run_recipe
from torchtune_adaptive.loop.batch_size import set_batch_sizes
from torchtune_adaptive.loop.training_loop import Run, TrainingLoop
from torchtune_adaptive.models.model import build_model
from torchtune_adaptive.models.optimizer import Optimization
from torchtune_adaptive.objectives.finetuning import ForwardBackward, build_loss
from torchtune_adaptive.objectives.stages import build_stages
from torchtune_adaptive.objectives.validation import build_validation


class AdaptiveFullFinetuneDistributed:
    """One run: `__init__` checks the config, `setup` builds, `train` trains and saves, `cleanup` closes."""

    def __init__(self, cfg: DictConfig) -> None:
        self.run = Run(read_full_settings(cfg), Contents())

    def setup(self) -> None:
        """Collective: build model, optimizer and data, and find the batch size."""
        run, settings, devices = self.run, self.run.settings, self.run.devices
        weights = run.checkpoints.load()
        self.model = build_model(settings, devices, weights, with_adapters=run.contents.lora is not None)
        self.optimization = Optimization(settings, self.model, weights, devices.device)
        run.resume(weights)
        loss_fn = build_loss(settings, self.model)
        tokenizer = components.build("tokenizer", settings.config)
        kind = replace(TEXT, ignored_label=loss_fn.ignore_index)
        self.data = build_data(settings, tokenizer, devices.mesh, kind)
        passes = ForwardBackward(self.model, loss_fn, self.data, settings, devices.device)
        stages = build_stages({"": (self.model, passes)}, self.data, settings, devices.device, run.journal.event)
        self.runner = stages.training
        validation = build_validation(passes.on_validation_data, settings, self.data, stages, tokenizer, devices.mesh)
        self.loop = TrainingLoop(
            run, self.model, self.data, self.optimization, stages, loss_fn=loss_fn, validation=validation
        )
        set_batch_sizes(self.loop)

    def train(self) -> None:
        """Collective: run the remaining steps and save checkpoints."""
        with self.loop.training() as steps:
            for step in steps:
                result = self.runner.run(step.samples, step=step.number, upcoming=step.upcoming)
                with self.runner.committing("the optimizer step", last_checkpoint=self.run.checkpoints.last):
                    grad_norm = self.optimization.update(result.target_tokens)
                self.loop.finish_step(result, grad_norm)

    def cleanup(self) -> None:
        """Collective: finish saves and leave the process group."""
        self.loop.close()


if __name__ == "__main__":
    run_recipe(AdaptiveFullFinetuneDistributed)
