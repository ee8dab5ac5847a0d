"""The optimizer steps of one `Trainer.train()`, run by the engine in microbatches that fit into memory."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import cycle, islice
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from torchtune_adaptive.engine.fsdp import FSDPModule
from torchtune_adaptive.engine.limits import RowLimit, TokenLimit
from torchtune_adaptive.engine.memory import MemorySource, memory_within, resident_tensors
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size
from torchtune_adaptive.engine.ranks import from_all_ranks, rank, world_size
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.engine.snapshot import RngState
from torchtune_adaptive.engine.step import Recovery, SampleKind, StepRunner
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import count_of, parse_size
from torchtune_adaptive.hf.losses import (
    Reduction,
    TwoSamples,
    WithoutDropout,
    draw,
    how_losses_add_up,
    tolerance_of,
    worst_error,
)
from torchtune_adaptive.hf.samples import SAMPLES_KEY, CollatedBatch, GeneratedRow, RawSample
from torchtune_adaptive.report.tables import search_table

STATE = "adaptive"
"""Key of the limit in `trainer_state.json`, under `stateful_callbacks`."""
CANDIDATES = 4
"""Number of candidates: the loss check pairs a sample with the candidate whose loss differs most from its own."""
NOT_SPLIT = (
    "so a step cannot be split; use a loss that is a sum or a mean over rows or tokens, without terms that compare "
    "samples, batch normalization or random numbers for each row"
)
COUNTERS = ("_metrics", "_total_train_tokens", "custom_metrics")
"""Attributes that compute_loss updates in TRL's and ms-swift's trainers; a repeated step restores them."""

IN_ATTRIBUTES = (bool, int, float, str, Tensor)
"""Types of the attributes that the checks of a loss restore."""


class BatchLoss(NamedTuple):
    """The loss of a batch."""

    loss: float
    targets: tuple[int, int]
    drew: bool
    """True if the forward pass drew random numbers."""


class OptimizerSteps:
    """Runs the optimizer steps of a Trainer. The constructor measures the batch size, if that is requested."""

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        batches: Sequence[CollatedBatch],
        num_items: Any,
        while_training: ExitStack,
    ) -> None:
        """Collective: call it in the first step, after the model is prepared and a checkpoint is loaded."""
        self.trainer, adaptive = trainer, trainer.adaptive
        self.model = _inside_ddp(model, trainer.accelerator)
        self.optimizer: torch.optim.Optimizer = trainer.optimizer.optimizer  # inside accelerate's wrapper
        self._steps_run = 0
        self._leftover: list[tuple[Tensor, Tensor]] = []
        """Weights and their gradients from an incomplete step at the end of a stream."""
        self._leftover_step: int | None = None
        self._begin(batches, num_items)
        self._check_collation(batches[0])
        counts_tokens = adaptive.use_maximum_batch_size or adaptive.token_budget is not None
        texts = [batches[0].inputs[name] for name in ("input_ids", "labels") if name in batches[0].inputs]
        tokens = max((text.shape[-1] for text in texts if text.ndim == 2), default=0)
        if counts_tokens and tokens > 1 == max(each.length for each in self._samples):
            raise ConfigError(
                "a search or token budget needs the lengths of samples, but the samples have no input_ids before the "
                "data collator makes some: tokenize in the dataset, into input_ids, or set "
                "per_device_train_batch_size alone"
            )
        self._learn_reduction()
        two = self._collated(self._samples[:1] * 2).inputs
        padded = "input_ids" not in two or len(two["input_ids"]) > 1
        budget, rows_per_sample = adaptive.token_budget, len(self._samples[0].row_lengths)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        # TRL does not freeze the models that it does not train.
        models = [self.model, *(each.requires_grad_(False) for each in other_models(trainer, trained))]
        self.runner = StepRunner(
            self.model,
            self._forward_backward,
            kind=SampleKind(
                length_of=attrgetter("length"),
                row_lengths_of=attrgetter("row_lengths"),
                filler=lambda _: self._filler,
                padded=padded,
            ),
            limit=TokenLimit(budget, rows_per_sample)
            if isinstance(budget, int)
            else RowLimit(trainer.args.per_device_train_batch_size),
            recovery=Recovery(
                *models,
                enabled=adaptive.recover_from_oom,
                regrow_after=adaptive.regrow_after,
                on_attempt=lambda stage, *_: trainer._evaluator.begin_attempt() if stage else self._restore(),
            ),
        )
        while_training.callback(self.runner.close)
        self.memory = while_training.enter_context(enforced_memory_limit(trainer, models, [self.optimizer]))
        if adaptive.use_maximum_batch_size or budget == "auto":
            found, longest = self._search()
            self.runner.use_limit(
                TokenLimit(int(found.unrounded_rows * longest) * rows_per_sample, rows_per_sample)
                if budget == "auto"
                else RowLimit(found.rows)
            )
            self._restore()
        self.runner.measure_memory(self.memory)
        if state := trainer.state.stateful_callbacks.get(STATE):
            self.runner.load_state_dict(state)

    def run(self, batches: Sequence[CollatedBatch], num_items: Any) -> Tensor:
        """Collective: compute the gradients of a step and return its loss."""
        self._begin(batches, num_items)
        self._steps_run += 1
        if self._steps_run > 1 and self._steps_run.bit_count() == 1:  # 2, 4, 8, ...
            self._check_collation(batches[0])
            self._check_losses()
        result = self.runner.run(self._samples, step=self.trainer.state.global_step + 1)
        self._batches.clear()
        for parameter, gradient in self._leftover:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._leftover.clear()
        self.trainer.state.stateful_callbacks[STATE] = self.runner.state_dict()
        return result.loss_sum / world_size()  # Trainer logs the mean over ranks

    def refuse_without_steps(self) -> None:
        """Raise a ConfigError if the dataset has ended within a step twice, with no complete step in between."""
        step = self.trainer.state.global_step
        if step == self._leftover_step:
            batches = self.trainer.current_gradient_accumulation_steps, self.trainer.args.gradient_accumulation_steps
            raise ConfigError(
                f"the dataset has {batches[0]} batches per rank, but one step needs {batches[1]}: lower "
                "gradient_accumulation_steps or per_device_train_batch_size"
            )
        self._leftover_step = step

    def keep_gradients(self) -> None:
        """Keep the gradients of an incomplete step, to add them to those of the next step as Trainer does."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._leftover.append((parameter, parameter.grad))
                parameter.grad = None

    def metrics(self) -> dict[str, float]:
        """Collective: return the metrics to log in addition to the loss."""
        average_metrics(self.trainer, "train")
        limit = self.runner.limit
        return {"oom_recoveries": self.runner.recoveries, f"microbatch_{limit.unit}": limit.size}

    def _begin(self, batches: Sequence[CollatedBatch], num_items: Any) -> None:
        self._count = len(batches)
        self._samples: list[Any] = [sample for batch in batches for sample in batch.samples]
        # A microbatch that equals a batch of the data loader is not collated again.
        self._batches: dict[tuple[int, ...], CollatedBatch] = {tuple(map(id, each.samples)): each for each in batches}
        self._filler: RawSample = copy.copy(min(self._samples, key=attrgetter("length")).as_targets())
        self._targets_of_step = sums_of([batch.targets for batch in batches])
        self._num_items = num_items
        self._restore = snapshot(self.trainer)

    def _forward_backward(self, samples: Sequence[RawSample]) -> Totals:
        """Run one microbatch with Trainer's training_step."""
        batch = self._batches.get(tuple(map(id, samples))) or self._collated(samples)
        rows, targets = (0, (0, 0)) if samples[0] is self._filler else (len(samples), batch.targets)
        weight = self._reduction.weight((rows, targets), (len(self._samples), self._targets_of_step))
        if self._reduction is not Reduction.SUM:  # Trainer divides means by the number of batches
            weight *= self._count
        if not weight:  # without targets, a mean is NaN, even times 0
            batch = self._collated([self._filler])
        backward = self.trainer.accelerator.backward

        def weighted_backward(loss: Tensor, **kwargs: Any) -> None:
            backward(loss * weight, **kwargs)

        with self._alone(), replaced(self.trainer.accelerator, backward=weighted_backward):
            loss = Trainer.training_step(self.trainer, self.model, batch.inputs, self._num_items)
        return Totals(loss * weight, targets[self._counted])

    def _collated(self, samples: Sequence[RawSample]) -> CollatedBatch:
        return CollatedBatch.of(samples, self.trainer.keeps_samples)

    def _alone(self) -> AbstractContextManager[None]:
        return only_fsdp_communicates(self.trainer, self.model, generated=isinstance(self._samples[0], GeneratedRow))

    def _check_collation(self, batch: CollatedBatch) -> None:
        """Collective: check that collation is deterministic. Waits for the device, so it is not run in every step."""
        if not all(from_all_ranks(batch.is_reproducible(self.trainer.keeps_samples))):
            raise ConfigError(
                "collating the same samples twice gives different batches, so a step cannot be split: the data "
                "collator is random, or code edits the batch; do this in the dataset"
            )

    def _learn_reduction(self) -> None:
        """Collective: find out how the losses of microbatches add up, before the first step."""
        trainer, on_ranks = self.trainer, self._try_two_samples()
        next_tokens = getattr(trainer, "_loss_shifts_labels", True)
        self._tolerance = tolerance_of(self.model, mixed_precision=trainer.accelerator.mixed_precision != "no")
        reduction = how_losses_add_up(on_ranks, next_tokens=next_tokens, tolerance=self._tolerance)
        if reduction is None:
            both, first, second, *_ = on_ranks[0]
            raise ConfigError(
                f"the loss of two samples is {both:.4g} in one batch, and {first:.4g} and {second:.4g} in separate "
                f"batches: it is neither their sum nor their mean, {NOT_SPLIT}"
            )
        self._reduction = reduction
        shifts = {Reduction.MEAN_OF_LABELS: False, Reduction.MEAN_OF_NEXT_TOKENS: True}
        self._counted = int(shifts.get(reduction, next_tokens))
        """Index into `targets`: 0 if the loss counts all labels, 1 if it shifts them and drops the first of a row."""
        self._scale = max(abs(each.both) for each in on_ranks)
        """The largest loss before the first step. Later checks divide errors by this loss or by the current one,
        whichever is larger: if the current loss is near 0, rounding alone would be a large relative error."""

    def _check_losses(self) -> None:
        """Collective: raise an error if losses no longer add up as before the first step."""
        on_ranks = self._try_two_samples()
        worst = max(on_ranks, key=lambda each: worst_error([each], self._reduction, self._scale))
        if worst_error([worst], self._reduction, self._scale) > self._tolerance:
            both, first, second, *_ = worst
            since = self._steps_run // 2 - 1
            raise ConfigError(
                f"in step {self.trainer.state.global_step + 1}, the loss of two samples is {both:.4g} in one batch, "
                f"and {first:.4g} and {second:.4g} in separate batches: it is no longer their "
                f"{self._reduction.value}, {NOT_SPLIT}"
                + f"; the last {count_of(since, 'step')} may differ from Trainer's"
                * (since > 0)
            )

    def _try_two_samples(self) -> list[TwoSamples]:
        """Collective: return the losses of two samples on every rank, in one batch and in separate batches.

        The first try is in training mode, since some terms of a loss exist only there. If the forward pass draws random
        numbers on any rank, the second try disables dropout. If it still draws some, the third is in evaluation mode.
        """
        firsts, second = self._candidates()
        attention = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        # Compiling for two samples could exceed the limit of recompilations. flex_attention has to be compiled.
        eager = attention != "flex_attention"
        for training, context in ((True, nullcontext()), (True, WithoutDropout()), (False, nullcontext())):
            with torch.compiler.set_stance("force_eager" if eager else "default"), context:
                other, *ones = (self._loss_of([each], training=training) for each in (second, *firsts))
                index = max(range(len(ones)), key=lambda each: abs(ones[each].loss - other.loss))
                one, both = ones[index], self._loss_of([firsts[index], second], training=training)
            tried = TwoSamples(both.loss, one.loss, other.loss, (one.targets, other.targets), both.drew)
            on_ranks = from_all_ranks(tried)
            if not any(each.drew for each in on_ranks):
                break
        return on_ranks

    def _candidates(self) -> tuple[list[RawSample], RawSample]:
        """Return candidates for the first of two samples, and the second sample.

        All ranks return equally many candidates. A candidate and the second sample differ in the number of labels, to
        distinguish the reductions.
        """
        shortest = sorted(self._samples, key=attrgetter("length"))
        one = shortest[0]
        if isinstance(one, GeneratedRow):  # all scores may be 0, and all answers equally long
            return [one.scored(1.0, targets=1)], one.scored(2.0, targets=one.length)
        others = sorted(shortest, key=lambda each: (each.label == one.label, each.length == one.length))
        candidates = islice(cycle(shortest[:CANDIDATES]), CANDIDATES)
        return [each.as_targets(few=True) for each in candidates], others[0].as_targets()

    def _loss_of(self, samples: Sequence[RawSample], *, training: bool) -> BatchLoss:
        """Collective: return the loss of a batch; restore buffers, counters and random generators."""
        trainer, device, restore = self.trainer, self.trainer.args.device, snapshot(self.trainer)
        restore_attributes = attributes_of(trainer, *self.model.modules())
        batch = self._collated(samples)
        buffers = [(each, each.clone()) for each in self.model.buffers()] if training else []
        self.model.train(training)
        try:
            with torch.no_grad(), self._alone(), trainer.compute_loss_context_manager():
                inputs = trainer._prepare_inputs(batch.inputs)
                loss = float(trainer.compute_loss(self.model, inputs, num_items_in_batch=self._num_items))
            drawn = draw(device)
            restore()
            return BatchLoss(loss, batch.targets, drew=drawn != draw(device))
        finally:
            restore_attributes()
            self.model.train()
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # statistics of a batch normalization
                    buffer.copy_(before)
            restore()

    def _search(self) -> tuple[SearchResult, int]:
        """Collective: measure the rows of the longest sample that fit; return the result and the sample's tokens."""
        if self.memory is None:
            raise ConfigError("a CPU has no memory limit to search within; set memory_limit, for example 4GiB")
        samples, loader, length = self._samples, self.trainer.callback_handler.train_dataloader, attrgetter("length")
        if isinstance(samples[0], GeneratedRow):
            raise ConfigError(
                "samples are generated during training, so the longest is unknown: set per_device_train_batch_size"
            )
        if hasattr(loader.dataset, "__len__"):
            dataset = (loader.dataset[index] for index in range(len(loader.dataset)))
            whole = max(dataset, key=lambda features: RawSample(features).length)
            (longest,) = loader.collate_fn([whole])[SAMPLES_KEY].samples  # without columns that the model ignores
        else:  # a stream
            longest = max(from_all_ranks(max(samples, key=length)), key=length)
        found = find_max_batch_size(
            TrainingStep(
                runner=self.runner,
                sample=longest.as_targets(),
                update=lambda _: self.optimizer.step(),
                optimizers=[self.optimizer],
            ),
            memory=self.memory,
            samples_per_step=len(samples),
            whole_step_rows=len(samples),
            max_rows=len(samples),
        )
        if rank() == 0:
            print(search_table(found, longest.length), flush=True)
        return found, longest.length


@contextmanager
def replaced(owner: object, **attributes: Any) -> Iterator[None]:
    """Set attributes of an instance, and restore them on exit. The class does not change."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(owner).pop(name, None)
        vars(owner).update(before)


@contextmanager
def only_fsdp_communicates(trainer: Any, model: nn.Module, *, generated: bool = False) -> Iterator[None]:
    """Suppress the other collectives of a pass, which a rank that ran out of memory could not complete.

    compute_loss of TRL's trainers gathers metrics. Here, each rank uses its own value for all ranks, and
    `average_metrics` averages them later. TRL reads the weight of a frozen head without calling its module, so FSDP's
    hooks do not gather it: it is gathered first. `generated` batches are prepared already.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    gathers_head = isinstance(head, FSDPModule) and weight is not None and not weight.requires_grad
    with ExitStack() as stack:
        if generated:
            stack.enter_context(replaced(trainer, _prepare_inputs=lambda inputs: inputs))
        if world_size() > 1:
            local: dict[str, Any] = {"gather": _repeated, "gather_for_metrics": _repeated}
            local["reduce"] = lambda value, *_, **__: value  # TRL divides one sum by another, so local sums suffice
            stack.enter_context(replaced(trainer.accelerator, **local))
        if gathers_head:
            head.unshard()
        yield
        if gathers_head:
            head.reshard()


def average_metrics(trainer: Any, mode: str) -> None:
    """Collective: average the metrics that TRL's trainers have collected on each rank."""
    if mode not in getattr(trainer, "_metrics", ()):
        return
    collected = trainer._metrics[mode]
    everywhere = from_all_ranks(dict(collected))
    for name in collected:
        values = [value for each in everywhere for value in each.get(name, ()) if not math.isnan(value)]
        collected[name] = values or [math.nan]


def snapshot(trainer: Any) -> Callable[[], None]:
    """Return a function that restores random generators and TRL's counters, so that a repeated step draws the same."""
    python, numpy, torchs = random.getstate(), np.random.get_state(), RngState.capture()
    counters = {name: copy.deepcopy(getattr(trainer, name)) for name in COUNTERS if hasattr(trainer, name)}

    def restore() -> None:
        vars(trainer).update(copy.deepcopy(counters))
        random.setstate(python)
        np.random.set_state(numpy)
        torchs.restore()

    return restore


def attributes_of(*owners: Any) -> Callable[[], None]:
    """Return a function that restores numbers, texts and tensors in attributes, and the tensor of each buffer.

    A loss may count its calls, or keep an average in an attribute. A check of the loss must not change them.
    """

    def read(owner: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(owner).items() if isinstance(value, IN_ATTRIBUTES)}

    before = [(owner, read(owner), dict(vars(owner).get("_buffers", {}))) for owner in owners]

    def restore() -> None:
        for owner, attributes, buffers in before:
            for name in read(owner).keys() - attributes.keys():
                del vars(owner)[name]
            vars(owner).update(attributes)
            if buffers:
                owner._buffers.update(buffers)

    return restore


def other_models(trainer: Any, trained: Iterable[Tensor]) -> list[nn.Module]:
    """Return the models that the Trainer runs without training them, such as DPO's reference model."""
    identities = {id(parameter) for parameter in trained}
    return [
        module
        for module in vars(trainer).values()
        if isinstance(module, nn.Module) and not any(id(each) in identities for each in module.parameters())
    ]


def enforced_memory_limit(
    trainer: Any, models: Iterable[nn.Module], optimizers: Sequence[torch.optim.Optimizer] = ()
) -> AbstractContextManager[MemorySource | None]:
    """Return a context that enforces `memory_limit`, and counts the memory of these models and optimizers."""
    limit = trainer.adaptive.memory_limit
    size = None if limit is None else parse_size(limit, "memory_limit")
    resident = [tensor for each in models for tensor in resident_tensors(each, optimizers)]
    return memory_within(size, trainer.args.device, resident)


def sums_of(targets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the sum of each count of targets."""
    return sum(each[0] for each in targets), sum(each[1] for each in targets)


def _inside_ddp(model: Any, accelerator: Any) -> Any:
    """Return the model without DDP, which would average gradients in every backward instead of once per step."""
    wrapped = getattr(model, "_orig_mod", model)  # accelerate compiles the DDP module
    if not isinstance(wrapped, DistributedDataParallel):
        return model
    inside = wrapped.module
    return inside if wrapped is model else torch.compile(inside, **accelerator.state.dynamo_plugin.to_kwargs())


def _repeated(value: Any, *_: Any, **__: Any) -> Any:
    """Return this rank's value once per rank, in place of a gather."""
    return recursively_apply(lambda tensor: torch.cat([torch.atleast_1d(tensor)] * world_size()), value)
