"""Example of a custom recipe: knowledge distillation, in which a model learns from the outputs of a teacher.

    tune run --nproc_per_node 2 examples/recipes/distill.py --config my_config.yaml

Take a config of full finetuning, and add two sections: `teacher_model` and `teacher_checkpointer`. Search, token
budgets (with padding), recovery, checkpoints, resuming and the journal work as in every recipe.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from omegaconf import DictConfig
from torch.nn.functional import kl_div, pad

from torchtune_adaptive import RowLimit, StepRunner, Totals
from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.checkpoints.manager import load_reference
from torchtune_adaptive.config import components
from torchtune_adaptive.config.checks import read_full_settings
from torchtune_adaptive.data.loading import build_data
from torchtune_adaptive.data.samples import TEXT, Sample
from torchtune_adaptive.engine.step import Stages
from torchtune_adaptive.lifecycle.entry_point import run_recipe
from torchtune_adaptive.loop.batch_size import set_batch_sizes
from torchtune_adaptive.loop.training_loop import Run, TrainingLoop
from torchtune_adaptive.models.model import build_frozen_model, build_model
from torchtune_adaptive.models.optimizer import Optimization
from torchtune_adaptive.objectives.stages import build_recovery


class Distillation:
    def __init__(self, cfg: DictConfig) -> None:
        self.run = Run(read_full_settings(cfg), Contents("distillation"))

    def setup(self) -> None:
        run, settings, devices = self.run, self.run.settings, self.run.devices
        weights, teacher = run.checkpoints.load(), load_reference(settings, "teacher_checkpointer")
        self.model = build_model(settings, devices, weights)
        self.teacher = build_frozen_model(settings, devices, teacher, "teacher_model", "teacher_checkpointer")
        self.optimization = Optimization(settings, self.model, weights, devices.device)
        run.resume(weights)
        tokenizer, loss_fn = (components.build(key, settings.config) for key in ("tokenizer", "loss"))
        kind = replace(TEXT, ignored_label=loss_fn.ignore_index)
        self.data = build_data(settings, tokenizer, devices.mesh, kind)
        self.runner = StepRunner(
            self.model,
            self.distill,
            kind=self.data.kind.for_steps(self.model),
            limit=RowLimit(settings.batch_size),
            recovery=build_recovery(settings, run.journal.event, self.model, self.teacher),
        )
        self.loop = TrainingLoop(run, self.model, self.data, self.optimization, Stages({"": self.runner}))
        set_batch_sizes(self.loop)

    def distill(self, samples: Sequence[Sample]) -> Totals:
        """One microbatch. The loss is a sum, so that a token counts the same however the step is split."""
        device, ignored = self.run.devices.device, self.data.kind.ignored_label
        batch = {key: value.to(device) for key, value in self.data.collate(self.data.kind.rows_of(samples)).items()}
        learned = pad(batch.pop("labels")[:, 1:], (0, 1), value=ignored) != ignored
        with torch.no_grad():
            expected = self.teacher(**batch)[learned].float().log_softmax(-1)
        answered = self.model(**batch)[learned].float().log_softmax(-1)
        loss = kl_div(answered, expected, reduction="sum", log_target=True)
        loss.backward()
        return Totals(loss.detach(), int(learned.sum()))

    def train(self) -> None:
        with self.loop.training() as steps:
            for step in steps:
                result = self.runner.run(step.samples, step=step.number)
                with self.runner.committing("the optimizer step", last_checkpoint=self.run.checkpoints.last):
                    grad_norm = self.optimization.update(result.target_tokens)
                self.loop.finish_step(result, grad_norm)

    def cleanup(self) -> None:
        self.loop.close()


if __name__ == "__main__":
    run_recipe(Distillation, keys=("teacher_model", "teacher_checkpointer"))
