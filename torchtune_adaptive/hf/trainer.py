"""`class T(AdaptiveMixin, SFTTrainer)`: any Trainer, with its optimizer steps run by the engine.

Trainer's loop stays as it is. Two of its methods are overridden: `get_batch_samples`, which reads the batches of a
step, keeps their samples; `training_step`, called for each batch, does nothing until the last, and then runs them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor, nn
from transformers import Trainer

from torchtune_adaptive.errors import AdaptiveError, ConfigError, without_backward
from torchtune_adaptive.hf.arguments import IN_ARGUMENTS, AdaptiveArguments
from torchtune_adaptive.hf.samples import CollatedBatch, KeepSamples
from torchtune_adaptive.hf.steps import OptimizerSteps

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class AdaptiveMixin(Base):
    """Put it before a Trainer: `class T(AdaptiveMixin, Trainer)`, then `T(..., adaptive=AdaptiveArguments(...))`.

    Every step has the samples, loss and gradients of the Trainer without it. How they are split into microbatches
    depends on what fits: `per_device_train_batch_size` is only where that begins.
    """

    def __init__(self, *args: Any, adaptive: AdaptiveArguments | None = None, **kwargs: Any) -> None:
        self.adaptive = adaptive or AdaptiveArguments()
        self._steps: OptimizerSteps | None = None
        self._batches: list[CollatedBatch] = []
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Collective: as Trainer's."""
        try:
            return super().train(*args, **kwargs)
        except AdaptiveError as error:
            if self.args.gradient_checkpointing:
                error.remedies = without_backward(error.remedies)
            error.fact, error.remedies = error.in_words(IN_ARGUMENTS), ()
            raise
        finally:
            steps, self._steps = self._steps, None
            if steps is not None:
                steps.runner.close()

    def get_train_dataloader(self) -> Any:
        """As Trainer's, with the samples beside each batch."""
        with patch.object(self, "data_collator", KeepSamples(self.data_collator)):
            loader = super().get_train_dataloader()
        if isinstance(loader, DataLoaderDispatcher) and self.accelerator.num_processes > 1:
            raise ConfigError(
                "rank 0 would read and collate for all ranks, which AdaptiveMixin does not support; set "
                "accelerator_config={'dispatch_batches': False} and split an iterable dataset by rank"
            )
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Collective: the batches of one optimizer step, whose samples are kept."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._batches = [CollatedBatch.from_loader(batch) for batch in batches]
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collective: with the last batch, forward and backward over the whole step; before it, nothing."""
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        if not self._batches:  # called by hand, outside of train()
            return super().training_step(model, inputs, num_items_in_batch)
        if self._steps is None:
            self._steps = OptimizerSteps(self, model, super().training_step, self._batches, num_items_in_batch)
        batches, self._batches = self._batches, []
        return self._steps.run(batches, num_items_in_batch)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Collective while training: as Trainer's, with what has become of the microbatches."""
        if self._steps is not None and "loss" in logs:
            logs |= self._steps.metrics()
        super().log(logs, *args, **kwargs)


class AdaptiveTrainer(AdaptiveMixin, Trainer):
    """transformers' Trainer that finds what fits, and survives running out of memory."""


def _refuse_unsupported(trainer: Trainer) -> None:
    args = trainer.args
    graphs = args.torch_compile_mode in ("reduce-overhead", "max-autotune")
    for unsupported, what, instead in (
        (args.auto_find_batch_size, "auto_find_batch_size, which restarts training with a smaller batch,", "remove it"),
        (
            args.n_gpu > 1,
            f"nn.DataParallel ({args.n_gpu} GPUs in one process)",
            "start one process per GPU with accelerate launch or torchrun",
        ),
        (trainer.is_deepspeed_enabled, "DeepSpeed", "use FSDP2 (`fsdp_version: 2`) or DDP"),
        (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2, "FSDP1", "set `fsdp_version: 2`"),
        (graphs, f"torch_compile_mode {args.torch_compile_mode!r} (CUDA graphs)", "remove it"),
    ):
        if unsupported:
            raise ConfigError(f"{what} is not supported by AdaptiveMixin; {instead}")
