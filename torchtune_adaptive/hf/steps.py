"""The optimizer steps of one `Trainer.train()`: each goes through the engine, which splits it as memory allows."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
    worst_miss,
)
from torchtune_adaptive.hf.replaced import replaced
from torchtune_adaptive.hf.samples import KEPT, CollatedBatch, GeneratedRow, RawSample
from torchtune_adaptive.report.tables import search_table

STATE = "adaptive"
"""The key of the limit in `trainer_state.json`, under `stateful_callbacks`."""
CANDIDATES = 4
"""Samples that are tried for one whose loss differs from another's."""
NOT_SPLIT = (
    "so a step cannot be split; use a loss that is a sum or a mean over rows or tokens, without terms that compare "
    "samples, batch normalization or random numbers for each row"
)
COUNTED = ("_metrics", "_total_train_tokens")
"""What compute_loss of TRL's trainers adds to: a repeated step must not count twice."""


class BatchLoss(NamedTuple):
    loss: float
    targets: tuple[int, int]
    drew: bool
    """Whether random numbers were drawn."""


class OptimizerSteps:
    """Runs the samples of each step, beginning with the given ones."""

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        batches: Sequence[CollatedBatch],
        num_items: Any,
        while_training: ExitStack,
    ) -> None:
        """Collective: after the model is prepared and a checkpoint is loaded."""
        self.trainer, adaptive = trainer, trainer.adaptive
        self.model = _inside_ddp(model, trainer.accelerator)
        self.optimizer: torch.optim.Optimizer = trainer.optimizer.optimizer  # inside accelerate's
        self._frozen_head = _frozen_head(self.model)
        self._run = 0
        """Steps that have been run."""
        self._kept: list[tuple[Tensor, Tensor]] = []
        """Weights, and their gradients from the batches that a stream left at its end."""
        self._kept_in_step: int | None = None
        self._begin(batches, num_items)
        self._check_collation(batches[0])
        counts_tokens = adaptive.use_maximum_batch_size or adaptive.token_budget is not None
        tokens = batches[0].inputs.get("input_ids", torch.empty(1, 0)).shape[-1]
        if counts_tokens and tokens > 1 == max(each.length for each in self._samples):
            raise ConfigError(
                "a search or a budget of tokens goes by the lengths of samples, but these have no tokens until they "
                "are collated: tokenize in the dataset, into input_ids"
            )
        self._learn_how_losses_add_up()
        two = self._collated(self._samples[:1] * 2).inputs
        padded = "input_ids" not in two or len(two["input_ids"]) > 1
        budget, rows_per_sample = adaptive.token_budget, len(self._samples[0].row_lengths)
        models = [self.model, *self._models_beside()]
        self.runner = StepRunner(
            self.model,
            self._forward_backward,
            kind=SampleKind(
                length_of=attrgetter("length"),
                row_lengths_of=attrgetter("row_lengths"),
                stand_in=lambda _: self._filler,
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
                on_attempt=lambda *_: self._restore(),
            ),
        )
        while_training.callback(self.runner.close)
        size = None if adaptive.memory_limit is None else parse_size(adaptive.memory_limit, "memory_limit")
        resident = [tensor for each in models for tensor in resident_tensors(each, [self.optimizer])]
        memory = while_training.enter_context(memory_within(size, trainer.args.device, resident))
        if adaptive.use_maximum_batch_size or budget == "auto":
            found, longest = self._search(memory)
            self.runner.use_limit(
                TokenLimit(int(found.fits_rows * longest) * rows_per_sample, rows_per_sample)
                if budget == "auto"
                else RowLimit(found.rows)
            )
            self._restore()
        self.runner.watch(memory)
        if state := trainer.state.stateful_callbacks.get(STATE):
            self.runner.load_state_dict(state)

    def run(self, batches: Sequence[CollatedBatch], num_items: Any) -> Tensor:
        """Collective: the loss of a step, whose gradients are complete."""
        self._begin(batches, num_items)
        self._run += 1
        if self._run > 1 and self._run.bit_count() == 1:  # the 2nd, 4th, 8th ...: of the 1st it is known
            self._check_collation(batches[0])
            self._check_losses()
        result = self.runner.run(self._samples, step=self.trainer.state.global_step + 1)
        self._batches.clear()
        for parameter, gradient in self._kept:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._kept.clear()
        self.trainer.state.stateful_callbacks[STATE] = self.runner.state_dict()
        return result.loss_sum / world_size()  # Trainer logs the mean over ranks

    def refuse_without_steps(self) -> None:
        """Raise a ConfigError if the dataset ended within a step twice without a complete step in between."""
        step = self.trainer.state.global_step
        if step == self._kept_in_step:
            batches = self.trainer.current_gradient_accumulation_steps, self.trainer.args.gradient_accumulation_steps
            raise ConfigError(
                f"the dataset has {batches[0]} batches for each rank, but one step takes {batches[1]}: lower "
                "gradient_accumulation_steps or per_device_train_batch_size"
            )
        self._kept_in_step = step

    def keep_gradients(self) -> None:
        """Keep the gradients of an incomplete step, and add them to those of the next, as Trainer does."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._kept.append((parameter, parameter.grad))
                parameter.grad = None

    def metrics(self) -> dict[str, float]:
        """Collective: what to log beside the loss. TRL, which has counted on each rank, averages over all of them."""
        if "train" in getattr(self.trainer, "_metrics", ()):
            counted = self.trainer._metrics["train"]
            everywhere = from_all_ranks(dict(counted))
            for name in counted:
                values = [value for each in everywhere for value in each.get(name, ()) if not math.isnan(value)]
                counted[name] = values or [math.nan]
        limit = self.runner.limit
        return {"oom_recoveries": self.runner.recoveries, f"microbatch_{limit.unit}": limit.size}

    def _begin(self, batches: Sequence[CollatedBatch], num_items: Any) -> None:
        self._count = len(batches)
        self._samples: list[Any] = [sample for batch in batches for sample in batch.samples]
        # A microbatch that is just one of them is run as the data loader has collated it.
        self._batches: dict[tuple[int, ...], CollatedBatch] = {tuple(map(id, each.samples)): each for each in batches}
        self._filler: RawSample = copy.copy(min(self._samples, key=attrgetter("length")).as_targets())
        self._targets_of_step = [sum(counts) for counts in zip(*(batch.targets for batch in batches), strict=True)]
        self._num_items = num_items
        self._restore = self._snapshot()

    def _snapshot(self) -> Callable[[], None]:
        """What puts back what TRL has counted, and random generators: a step that is repeated draws the same."""
        trainer, python, numpy, torchs = self.trainer, random.getstate(), np.random.get_state(), RngState.capture()
        counted = {name: copy.deepcopy(getattr(trainer, name)) for name in COUNTED if hasattr(trainer, name)}

        def restore() -> None:
            vars(trainer).update(copy.deepcopy(counted))
            random.setstate(python)
            np.random.set_state(numpy)
            torchs.restore()

        return restore

    def _forward_backward(self, samples: Sequence[RawSample]) -> Totals:
        """One microbatch, by the Trainer's own training_step."""
        batch = self._batches.get(tuple(map(id, samples))) or self._collated(samples)
        rows, targets = (0, 0) if samples[0] is self._filler else (len(samples), batch.targets[self._counted])
        # Trainer adds up the losses of its batches, and divides by their number where these are means.
        weight = {
            Reduction.SUM: float(rows > 0),
            Reduction.MEAN_OF_ROWS: self._count * rows / len(self._samples),
        }.get(self._reduction, self._count * targets / max(1, self._targets_of_step[self._counted]))
        if not weight:  # a mean over no target is no number, not even times 0
            batch = self._collated([self._filler])
        backward = self.trainer.accelerator.backward

        def weighted_backward(loss: Tensor, **kwargs: Any) -> None:
            backward(loss * weight, **kwargs)

        with self._alone(), replaced(self.trainer.accelerator, backward=weighted_backward):
            loss = Trainer.training_step(self.trainer, self.model, batch.inputs, self._num_items)
        return Totals(loss * weight, targets)

    def _collated(self, samples: Sequence[RawSample]) -> CollatedBatch:
        return CollatedBatch.of(samples, self.trainer.keeps_samples)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps what TRL generates, and what it communicates besides FSDP, out of a microbatch: a rank that has failed
        cannot take part.

        Its compute_loss gathers metrics: every rank takes the others' for its own, and `metrics` brings them together.
        Its head reads a weight past FSDP's hooks: one that is frozen in a group of its own is gathered before.
        """
        with ExitStack() as stack:
            if isinstance(self._samples[0], GeneratedRow):  # prepared already
                stack.enter_context(replaced(self.trainer, _prepare_inputs=lambda inputs: inputs))
            if world_size() > 1:
                mine: dict[str, Any] = {"gather": _repeated, "gather_for_metrics": _repeated}
                mine["reduce"] = lambda value, *_, **__: value  # of sums that TRL divides by each other
                stack.enter_context(replaced(self.trainer.accelerator, **mine))
            if self._frozen_head is not None:
                self._frozen_head.unshard()
            yield
            if self._frozen_head is not None:
                self._frozen_head.reshard()

    def _check_collation(self, batch: CollatedBatch) -> None:
        """Collective: refuses what a split would undo. Waits for the device, so not every step is looked at."""
        if not all(from_all_ranks(batch.is_made_again(self.trainer.keeps_samples))):
            raise ConfigError(
                "the same samples make another batch when they are collated again, so a step cannot be split: the data "
                "collator draws at random, or something edits the batch; do either in the dataset"
            )

    def _learn_how_losses_add_up(self) -> None:
        """Collective: before the first step."""
        trainer, on_ranks = self.trainer, self._try_two_samples()
        next_tokens = getattr(trainer, "_loss_shifts_labels", True)
        self._tolerance = tolerance_of(self.model, mixed_precision=trainer.accelerator.mixed_precision != "no")
        reduction = how_losses_add_up(on_ranks, next_tokens=next_tokens, tolerance=self._tolerance)
        if reduction is None:
            both, first, second, *_ = on_ranks[0]
            raise ConfigError(
                f"the loss of two samples is {both:.4g}, that of each {first:.4g} and {second:.4g}: neither their sum "
                f"nor their mean, {NOT_SPLIT}"
            )
        self._reduction = reduction
        shifts = {Reduction.MEAN_OF_LABELS: False, Reduction.MEAN_OF_NEXT_TOKENS: True}
        self._counted = int(shifts.get(reduction, next_tokens))
        """The count of targets, of a batch's two, that goes with the reduction."""
        self._scale = max(abs(each.both) for each in on_ranks)
        """Later losses may come close to 0, and rounding may then be a large share of them."""

    def _check_losses(self) -> None:
        """Collective: refuses a loss that no longer adds up as before the first step."""
        on_ranks = self._try_two_samples()
        worst = max(on_ranks, key=lambda each: worst_miss([each], self._reduction, self._scale))
        if worst_miss([worst], self._reduction, self._scale) > self._tolerance:
            both, first, second, *_ = worst
            since = self._run // 2 - 1
            raise ConfigError(
                f"in step {self.trainer.state.global_step + 1}, the loss of two samples is {both:.4g}, that of each "
                f"{first:.4g} and {second:.4g}: no longer their {self._reduction.value}, {NOT_SPLIT}"
                + f"; the last {count_of(since, 'step')} may differ from Trainer's"
                * (since > 0)
            )

    def _try_two_samples(self) -> list[TwoSamples]:
        """Collective: the losses on every rank of two samples, together and each by itself.

        In training mode, since a loss may have terms that evaluation has not. If random numbers are drawn there,
        without dropout; if they still are, in evaluation mode.
        """
        firsts, second = self._candidates()
        attention = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        # compiled for two samples, a model could reach the limit of recompilations; flex_attention has to be compiled
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
        """Samples of which one is to differ most in its loss from the last, on every rank equally many.

        They have other numbers of labels than the last, or a sum and the means could not be told apart.
        """
        shortest = sorted(self._samples, key=attrgetter("length"))
        one = shortest[0]
        if isinstance(one, GeneratedRow):  # all scores may be 0, and all answers of one length
            return [one.scored(1.0, targets=1)], one.scored(2.0, targets=one.length)
        others = sorted(shortest, key=lambda each: (each.label == one.label, each.length == one.length))
        candidates = islice(cycle(shortest[:CANDIDATES]), CANDIDATES)
        return [each.as_targets(few=True) for each in candidates], others[0].as_targets()

    def _loss_of(self, samples: Sequence[RawSample], *, training: bool) -> BatchLoss:
        """Collective: the loss of a batch, without a backward and without a trace."""
        trainer, device, restore = self.trainer, self.trainer.args.device, self._snapshot()
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
            self.model.train()
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # statistics of a batch normalization
                    buffer.copy_(before)
            restore()

    def _models_beside(self) -> list[nn.Module]:
        """Models that the Trainer runs and never trains, such as the reference of DPO. TRL leaves them unfrozen."""
        trained = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
        modules = [each for each in vars(self.trainer).values() if isinstance(each, nn.Module)]
        return [
            each.requires_grad_(False)
            for each in modules
            if not any(id(parameter) in trained for parameter in each.parameters())
        ]

    def _search(self, memory: MemorySource | None) -> tuple[SearchResult, int]:
        """Collective: how many rows of the longest sample fit, and its tokens. The steps leave no trace."""
        if memory is None:
            raise ConfigError("a CPU has no memory limit to search within; set memory_limit, for example 4GiB")
        samples, loader, length = self._samples, self.trainer.callback_handler.train_dataloader, attrgetter("length")
        if isinstance(samples[0], GeneratedRow):
            raise ConfigError("the longest sample is not known before it is generated: set per_device_train_batch_size")
        if hasattr(loader.dataset, "__len__"):
            dataset = (loader.dataset[index] for index in range(len(loader.dataset)))
            whole = max(dataset, key=lambda features: RawSample(features).length)
            (longest,) = loader.collate_fn([whole])[KEPT].samples  # less the columns that the model does not take
        else:  # only iterated over
            longest = max(from_all_ranks(max(samples, key=length)), key=length)
        found = find_max_batch_size(
            TrainingStep(
                runner=self.runner,
                sample=longest.as_targets(),
                update=lambda _: self.optimizer.step(),
                optimizers=[self.optimizer],
            ),
            memory=memory,
            samples_per_step=len(samples),
            whole_step_rows=len(samples),
            max_rows=len(samples),
        )
        if rank() == 0:
            print(search_table(found, longest.length), flush=True)
        return found, longest.length


def _inside_ddp(model: Any, accelerator: Any) -> Any:
    """The model without DDP, whose hooks would average in every backward: the runner does so once a step."""
    wrapped = getattr(model, "_orig_mod", model)  # accelerate compiles what DDP has wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        return model
    inside = wrapped.module
    return inside if wrapped is model else torch.compile(inside, **accelerator.state.dynamo_plugin.to_kwargs())


def _frozen_head(model: Any) -> FSDPModule | None:
    """The head, if it is frozen and FSDP has it in a group of its own."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    return head if isinstance(head, FSDPModule) and weight is not None and not weight.requires_grad else None


def _repeated(value: Any, *_: Any, **__: Any) -> Any:
    """What a rank takes to be gathered from all."""
    return recursively_apply(lambda tensor: torch.cat([torch.atleast_1d(tensor)] * world_size()), value)
