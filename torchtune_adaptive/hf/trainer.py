"""`adaptive(SFTTrainer)` or `class T(AdaptiveMixin, SFTTrainer)`: run the optimizer steps of a Trainer by the engine.

Trainer's loop is unchanged and calls `training_step` for each batch. `CollectsBatches` overrides Trainer's
`training_step`: it collects the samples of each batch, and runs the whole step when it gets the last batch. The data
collator adds the samples to the batch. If a trainer generates, samples come from `_prepare_inputs`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from torchtune_adaptive.arguments import AdaptiveArguments
from torchtune_adaptive.contexts import override_attributes
from torchtune_adaptive.engine.fsdp import FSDPModule
from torchtune_adaptive.engine.oom import fatal_on_oom
from torchtune_adaptive.engine.ranks import PlainGathers, from_all_ranks, rank
from torchtune_adaptive.errors import AdaptiveError, ConfigError, RecoveryUnsupportedError, Remedy
from torchtune_adaptive.hf.checkpoints import newest_complete
from torchtune_adaptive.hf.evaluation import Evaluator
from torchtune_adaptive.hf.passes import GenerationPasses
from torchtune_adaptive.hf.samples import SAMPLES_KEY, CollatedBatch, GeneratedRow, KeepSamples
from torchtune_adaptive.hf.steps import OptimizerSteps, Shared

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


REMEDIES_AS_ARGUMENTS = {
    Remedy.CHECKPOINT_ACTIVATIONS: "set gradient_checkpointing=True",
    Remedy.MORE_RANKS: "shard the model over more ranks with FSDP2",
    Remedy.LARGER_BUDGET: "raise memory_limit",
    Remedy.SMALLER_LIMIT: "lower per_device_train_batch_size",
    Remedy.NO_RECOVERY: "set recover_from_oom=False",
    Remedy.RECOVERY: "set recover_from_oom=True",
    Remedy.FEWER_ROWS: "set use_maximum_batch_size=False",
    Remedy.ROOM_FOR_NCCL: "if CUDA was out of memory, leave more memory to NCCL: set memory_limit, for example to 0.9",
    Remedy.CAP_MEMORY: "set memory_limit, for example to 8GiB",
}
"""The text of each remedy, expressed as a value of TrainingArguments or AdaptiveArguments."""


class CollectsBatches(Trainer):
    """Overrides Trainer's `training_step`, as the class directly before Trainer in the method resolution order.

    So `super().training_step` in a subclass of Trainer, such as TRL's, calls this method.
    """

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collective: collect a batch; with the last batch of a step, run forward and backward of all its batches."""
        assert isinstance(self, AdaptiveMixin)
        if self._batches is None:  # called outside of train()
            return super().training_step(model, inputs, num_items_in_batch)
        return self._collect(self._batches, model, inputs, num_items_in_batch)


class AdaptiveMixin(Base):
    """Adds recovery and batch-size search to a Trainer: `class T(AdaptiveMixin, Trainer)`; see also `adaptive`.

    Samples, loss and gradients of a step are the same as without the mixin. Only the split of a step into microbatches
    changes, depending on memory. `per_device_train_batch_size` is the initial size of a microbatch.
    """

    default_arguments = AdaptiveArguments()
    """The arguments of a trainer that is constructed without `adaptive`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__[: cls.__mro__.index(AdaptiveMixin)]:
            raise TypeError(f"AdaptiveMixin must precede the Trainer: class {cls.__name__}(AdaptiveMixin, ...)")
        order = cls.__mro__
        if Trainer in order and order[order.index(Trainer) - 1] is not CollectsBatches:
            others = (base for base in cls.__bases__ if base not in (Trainer, CollectsBatches))
            cls.__bases__ = (*others, CollectsBatches)

    def __init__(self, *args: Any, adaptive: AdaptiveArguments | None = None, **kwargs: Any) -> None:
        if not isinstance(adaptive, AdaptiveArguments | None):
            raise ConfigError(f"adaptive is a {type(adaptive).__name__}: pass AdaptiveArguments(...)")
        self.adaptive = adaptive or replace(self.default_arguments)
        self._shared: Shared | None = None
        self._steps: OptimizerSteps | None = None
        self._passes: GenerationPasses | None = None
        self._batches: list[CollatedBatch] | None = None
        """The batches of the current step; None outside of train()."""
        self._evaluator = Evaluator(self)
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Collective: see Trainer.train. `resume_from_checkpoint=True` takes the newest complete checkpoint, and "auto"
        does the same, but starts from the beginning if there is none."""
        if resume_from_checkpoint in (True, "auto"):
            resume_from_checkpoint = newest_complete(self.args, required=resume_from_checkpoint is True)
        with ExitStack() as self._training_stack, self._explaining_errors():
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._evaluator.close()
                self._shared = self._steps = self._passes = self._batches = None

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Explain out-of-memory errors that are not recovered, and express remedies as arguments of Trainer."""
        try:
            with fatal_on_oom(self._explain):
                yield
        except AdaptiveError as error:
            impossible = {
                Remedy.CHECKPOINT_ACTIVATIONS: self.args.gradient_checkpointing,
                Remedy.SMALLER_LIMIT: self.args.per_device_train_batch_size == 1,
                Remedy.LARGER_BUDGET: self.adaptive.memory_limit is None,
            }
            error.remedies = tuple(each for each in error.remedies if not impossible.get(each))
            error.fact, error.remedies = error.in_words(REMEDIES_AS_ARGUMENTS), ()
            raise

    def _explain(self, error: Exception) -> RecoveryUnsupportedError:
        """Return an error with the place where memory ran out, and the remedies that help there."""
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        functions = {frame.f_code.co_name for frame in frames}
        own_methods = {frame.f_code.co_name for frame in frames if frame.f_locals.get("self") is self}
        remedies = [Remedy.LESS_STATE, Remedy.MORE_RANKS]
        if "evaluation_loop" in own_methods:
            gathers = "prediction_step" not in functions or "_preprocess_piece" in functions
            place = " while results are gathered, which cannot be split" * gathers
            remedy = "lower per_device_eval_batch_size or set prediction_loss_only=True"
            where, remedies = f"in evaluation{place} ({remedy})", []
        elif any(isinstance(frame.f_locals.get("self"), Optimizer) for frame in frames):
            where = "in the optimizer, whose state does not depend on the batch"
        elif "_forward_backward" in functions and not self.adaptive.recover_from_oom:
            where, remedies = "in training, and recovery is off", [Remedy.SMALLER_LIMIT, Remedy.RECOVERY]
        else:
            where, remedies = "in code that cannot be repeated", [Remedy.SMALLER_LIMIT, *remedies]
        return RecoveryUnsupportedError(
            f"out of memory on rank {rank()} {where}: {error}", *remedies, Remedy.LARGER_BUDGET
        )

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return Trainer's data loader, whose collator adds the samples to a batch. ms-swift passes some arguments."""
        self.keeps_samples = KeepSamples(self.data_collator)
        with override_attributes(self, data_collator=self.keeps_samples):
            loader = super().get_train_dataloader(*args, **kwargs)
        if isinstance(loader, DataLoaderDispatcher) and self.accelerator.num_processes > 1:
            raise ConfigError(
                f"{type(self).__name__} does not support dispatch_batches, where rank 0 collates for all ranks; set "
                "accelerator_config={'dispatch_batches': False}"
            )
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of one optimizer step; at the end of a streamed dataset, fewer than `num_batches`."""
        if self._batches is not None:
            self._refuse_training_step("does not call super().training_step for every batch of a step")
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._batches = [] if batches else None
        self._expected, self._stream_ended = len(batches), len(batches) < num_batches
        return batches, items

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Collective: run the training_step of the subclass, and check that it calls `super().training_step`."""
        before = len(self._batches or ())
        loss = super().training_step(*args, **kwargs)
        if self._batches is not None and len(self._batches) == before:
            self._refuse_training_step("does not call super().training_step for every batch of a step")
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Collective: see Trainer. If a callback ended the epoch within a step, first run its batches."""
        if self._batches:
            tr_loss += self._run_collected(self._batches, *self._model_and_items)
            assert self._steps is not None
            self._steps.keep_gradients()
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _refuse_training_step(self, fact: str) -> NoReturn:
        raise ConfigError(
            f"training_step of {type(self).__name__} {fact}; without exactly one call per batch, a step cannot be split"
        )

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: see Trainer.evaluation_loop."""
        loop = super().evaluation_loop
        # An overridden loop does not have to call prediction_step.
        is_overridden = getattr(loop, "__func__", None) is not Trainer.evaluation_loop
        with self._explaining_errors(), nullcontext() if is_overridden else self._evaluator.keeping_samples(dataloader):
            return loop(dataloader, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: run the prediction_step of the subclass; in evaluation_loop, split the batch if necessary. If the
        trainer generates, only the passes before the loss are split."""
        step = super().prediction_step
        with nullcontext() if self._passes is None else self._passes.recovering():
            return self._evaluator.predict(model, inputs, lambda inputs: step(model, inputs, *args, **kwargs))

    def _collect(self, collected: list[CollatedBatch], model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """Collect a batch. With the last batch of a step, run the step (which is collective) and return its loss."""
        if isinstance(inputs, MutableMapping) and SAMPLES_KEY in inputs:
            if len(collected) == self._expected:
                self._refuse_training_step("calls super().training_step more than once for a batch")
            batch = replace(inputs.pop(SAMPLES_KEY), inputs=type(inputs)({**inputs}))  # type: ignore[call-arg]
            collected.append(batch)
        elif type(self)._prepare_inputs is not Trainer._prepare_inputs:  # a trainer that generates
            model.train()
            if isinstance(unwrapped := getattr(model, "_orig_mod", model), FSDPModule):
                unwrapped.set_requires_gradient_sync(True)  # accelerate delays this, but no backward runs before
            self._passes = self._passes or GenerationPasses(self, self._share(model))
            with self._passes.recovering():
                inputs = self._prepare_inputs(inputs)
            collected.append(CollatedBatch.of_generated(GeneratedRow.all_of(inputs), inputs))
        else:
            raise ConfigError(
                f"training_step got a {type(inputs).__name__} without its samples: AdaptiveMixin needs Trainer's "
                "get_train_dataloader, a data collator that returns a dict of tensors, and a training_step that passes "
                "its batch to super().training_step"
            )
        self._model_and_items = model, num_items
        is_last = self.accelerator.sync_gradients
        if not is_last and not (self._stream_ended and len(collected) == self._expected):
            return torch.zeros((), device=self.args.device)
        loss = self._run_collected(collected, model, num_items)
        if not is_last:
            assert self._steps is not None
            self._steps.check_dataset_fills_a_step()
            self._steps.keep_gradients()
        return loss

    def _share(self, model: nn.Module) -> Shared:
        """Collective in the first call of `train()`: return what its passes share."""
        self._shared = self._shared or Shared(self, model, self._training_stack)
        return self._shared

    def _run_collected(self, collected: list[CollatedBatch], model: nn.Module, num_items: Any) -> Tensor:
        """Collective: run the collected batches of a step; if the epoch ends within the step, these are not all."""
        self._batches = None
        if any(batch.was_edited for batch in collected):
            self._refuse_training_step("changes a batch after it has called super().training_step")
        if any(parameter.grad is not None for parameter in model.parameters()):
            raise ConfigError(
                f"the model has gradients before the step: training_step of {type(self).__name__} or a callback calls "
                "backward, which a repeated step would not call again; add the loss of this call in compute_loss"
            )
        if self._steps is None:
            self._steps = OptimizerSteps(self, model, collected, num_items, self._share(model))
        return self._steps.run(collected, num_items)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Collective: see Trainer. A checkpoint that is being overwritten does not count as complete."""
        if self.args.should_save:
            state = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", TRAINER_STATE_NAME)
            state.unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Collective: see Trainer."""
        with PlainGathers() if self.args.device.type == "cpu" else nullcontext():
            super().save_model(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        """Collective: see Trainer. Wait for all ranks, because rank 0 then writes the file that marks completeness."""
        super()._save_rng_state(output_dir)
        from_all_ranks(None)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log. If `logs` contain a training loss, this is collective, and adds recoveries and the microbatch limit. To
        logs of an evaluation, it adds recoveries."""
        of_passes = self._passes.to_log() if self._passes is not None else {}
        if self._steps is not None and {"loss", "train_loss"} & logs.keys():
            added = self._steps.to_log() | of_passes
            logs |= added if "loss" in logs else {}
        elif any(name.startswith("eval_") for name in logs):
            logs |= self._evaluator.to_log() | of_passes
        super().log(logs, *args, **kwargs)


def adaptive(trainer_class: type[Trainer], **arguments: Any) -> Any:
    """Return a subclass of a Trainer with AdaptiveMixin, for example `adaptive(SFTTrainer)(model, args, ...)`.

    `arguments` are fields of AdaptiveArguments, for a trainer that is constructed without its argument `adaptive`.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"adaptive() got {trainer_class!r}: pass transformers' Trainer or a subclass of it")
    defaults = getattr(trainer_class, "default_arguments", AdaptiveArguments()).changed(**arguments)
    return _adaptive(cast(Any, trainer_class), defaults)


@cache
def _adaptive(trainer_class: type[Trainer], defaults: AdaptiveArguments) -> type[Trainer]:
    bases = (trainer_class,) if issubclass(trainer_class, AdaptiveMixin) else (AdaptiveMixin, trainer_class)
    members = {"__module__": __name__, "__doc__": trainer_class.__doc__, "default_arguments": defaults}
    return type(f"Adaptive{trainer_class.__name__}", bases, members)


class AdaptiveTrainer(AdaptiveMixin, Trainer):
    """transformers' Trainer with recovery from out-of-memory errors and batch-size search."""


def _refuse_unsupported(trainer: Trainer) -> None:
    args, batches = trainer.args, trainer.args.gradient_accumulation_steps
    optimizer = str(getattr(args.optim, "value", args.optim))
    refused = {
        "auto_find_batch_size, which restarts training with a smaller batch; remove it": args.auto_find_batch_size,
        "nn.DataParallel; start one process per GPU with accelerate launch or torchrun": args.n_gpu > 1,
        "DeepSpeed; use FSDP2 (`fsdp_version: 2`) or DDP": trainer.is_deepspeed_enabled,
        "FSDP1; set `fsdp_version: 2`": trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2,
        f"torch_compile_mode {args.torch_compile_mode!r} (CUDA graphs); remove it": (
            args.torch_compile_mode in ("reduce-overhead", "max-autotune")
        ),
        f"optim={optimizer!r}, which updates weights in the backward pass; use another optimizer": (
            "lomo" in optimizer or "layerwise" in optimizer
        ),
        "a step with answers of several generations; make steps_per_generation a multiple of "
        f"gradient_accumulation_steps ({batches})": (getattr(args, "steps_per_generation", None) or batches) % batches,
        "KTO's default loss on several ranks, which compares samples of all ranks; set loss_type='apo_zero_unpaired'": (
            getattr(trainer, "calculate_KL", False) and trainer.accelerator.num_processes > 1
        ),
        "train_sampling_strategy='batch_rebalance', whose batches have different numbers of rows; use another one": (
            str(getattr(args, "train_sampling_strategy", "")).endswith("batch_rebalance")
        ),
        "a quantile of the entropy of all rows; set top_entropy_quantile=1": (
            getattr(trainer, "top_entropy_quantile", 1.0) < 1
        ),
        "an entropy bonus, which does not add up over microbatches; set entropy_coef=0": (
            getattr(trainer, "_entropy_bonus_enabled", False)
        ),
    }
    for what, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{type(trainer).__name__} does not support {what}")
