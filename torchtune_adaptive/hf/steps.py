"""The optimizer steps of one `Trainer.train()`, which the engine runs in microbatches that fit into memory."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from torchtune_adaptive.contexts import override_attributes
from torchtune_adaptive.engine.fsdp import is_whole
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit
from torchtune_adaptive.engine.memory import MemorySource, memory_within, resident_tensors
from torchtune_adaptive.engine.plans import Plan, SampleKind
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size
from torchtune_adaptive.engine.ranks import from_all_ranks, rank, world_size
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.engine.snapshot import RngState
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import ConfigError, RecoveryUnsupportedError, Remedy
from torchtune_adaptive.formatting import parse_size
from torchtune_adaptive.hf.losses import CHECK_FAILED, NOT_SPLIT, UNDECIDED, LossCheck, Reduction
from torchtune_adaptive.hf.metrics import BatchMetrics, only_fsdp_communicates
from torchtune_adaptive.hf.samples import (
    IGNORED,
    SAMPLES_KEY,
    CollatedBatch,
    Counts,
    GeneratedRow,
    RawSample,
    indices_of_largest,
    media_in,
    row_lengths_in,
)
from torchtune_adaptive.report.tables import search_table

logger = logging.getLogger(__name__)

STATE = "adaptive"
"""Key of the limit in `trainer_state.json`, under `stateful_callbacks`."""
NOT_REPRODUCIBLE = (
    "collating the same samples twice gives different batches, so a step cannot be split: the data collator is random, "
    "or other code changes the batch; move such code into the dataset"
)
UNKNOWN = CHECK_FAILED, UNDECIDED
"""Reasons why a step cannot be split that may not hold for later steps."""
COUNTERS = ("_metrics", "_total_train_tokens", "custom_metrics")
"""Attributes that compute_loss updates in TRL's and ms-swift's trainers; they are restored for a repeated step."""


class Shared:
    """What all passes of one `Trainer.train()` share."""

    def __init__(self, trainer: Any, model: nn.Module, stack: ExitStack) -> None:
        """Collective: call this in the first step. The stack is closed at the end of `train()`."""
        adaptive, self.model = trainer.adaptive, _unwrap_ddp(model, trainer.accelerator)
        self.optimizer: torch.optim.Optimizer = trainer.optimizer.optimizer  # inside accelerate's wrapper
        self.trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.splits_batches = adaptive.searches or adaptive.token_budget is not None
        """True if the configuration requires microbatches that are not batches of the data loader."""
        models = [self.model, *other_models(trainer, self.trained)]
        regrow_after = adaptive.regrow_after
        try:
            self.recovery = Recovery(*models, enabled=adaptive.recover_from_oom, regrow_after=regrow_after)
        except RecoveryUnsupportedError as error:
            if self.splits_batches:
                raise
            warn_without_recovery(error.fact)
            self.recovery = Recovery(*models, enabled=False, regrow_after=regrow_after)
        stack.callback(self.recovery.close)
        self.memory = stack.enter_context(enforced_memory_limit(trainer, models, [self.optimizer]))


class OneStep:
    """The samples of one optimizer step, and the batches of the data loader that they come from."""

    def __init__(self, batches: Sequence[CollatedBatch], num_items: Any, restore: Callable[[], None]) -> None:
        """`restore` restores the state of the trainer before each pass."""
        self.num_items, self.restore, self.attempts = num_items, restore, 0
        self.samples: list[Any] = [sample for batch in batches for sample in batch.samples]
        self.filler: RawSample = copy.copy(min(self.samples, key=attrgetter("length")).with_targets())
        self.keeps_batches = False
        """True if each microbatch of the attempt is a part of one batch of the data loader. Losses are then averaged
        over each batch, and the means over the batches, as in stock Trainer."""
        self.batches = len(batches)
        self._unused: dict[tuple[int, ...], CollatedBatch] = {tuple(map(id, each.samples)): each for each in batches}
        self._batch_of = {id(sample): number for number, each in enumerate(batches) for sample in each.samples}
        self._counts_of_batches = [batch.counts for batch in batches]
        self._counts = Counts.total(self._counts_of_batches)

    def begin_attempt(self, plan: Plan, limit: Limit, rows: int) -> bool:
        """Begin an attempt. Return True if the plan splits batches of the data loader, or would split one with these
        rows. The last batch of a rank may have fewer."""
        self.attempts += 1
        batches = [{self._batch_of[id(self.samples[index])] for index in rows} for rows in plan]
        # Under a limit by length, the plans of ranks differ, but the check of the loss is collective.
        self.keeps_batches = not limit.by_length and all(len(each) <= 1 for each in batches)
        return limit.size < rows or not (self.keeps_batches and len(plan) == self.batches)

    def batch_of(self, samples: Sequence[RawSample]) -> int:
        """Return the number of the batch that these samples are a part of; 0 if microbatches mix batches."""
        return self._batch_of.get(id(samples[0]), 0) if self.keeps_batches else 0

    def take(self, samples: Sequence[RawSample]) -> CollatedBatch | None:
        """Return the batch of the data loader that has exactly these samples, which then need not be collated again.
        Each batch is returned once, because compute_loss may edit it."""
        return self._unused.pop(tuple(map(id, samples)), None)

    def weight(self, samples: Sequence[RawSample], counts: Counts, reduction: Reduction | None) -> float:
        """Return the factor of a microbatch's loss. Without a reduction, each microbatch is a batch."""
        if reduction is None:
            return 1.0
        batch = self._batch_of.get(id(samples[0])) if self.keeps_batches else None
        if batch is not None:
            return reduction.weight(counts, self._counts_of_batches[batch])
        # Trainer divides means by the number of batches
        return reduction.weight(counts, self._counts) * (1 if reduction is Reduction.SUM else self.batches)

    def drop_batches(self) -> None:
        """Free the batches that no microbatch has used."""
        self._unused.clear()


class Probed(NamedTuple):
    """The samples of a microbatch of a batch-size search."""

    first: RawSample
    last: RawSample
    other: RawSample

    def rows(self, number: int) -> list[RawSample]:
        """Return this number of samples."""
        return [self.first, *[self.other] * (number - 2), self.last][:number]


class OptimizerSteps:
    """Runs the optimizer steps of a Trainer."""

    def __init__(
        self, trainer: Any, model: nn.Module, batches: Sequence[CollatedBatch], num_items: Any, shared: Shared
    ) -> None:
        """Collective: check collator and loss, and search if configured. Call this in the first step of `train()`."""
        self.trainer, self._shared = trainer, shared
        self.model, self.optimizer, self.memory = shared.model, shared.optimizer, shared.memory
        self._wrapped: Any = getattr(model, "_orig_mod", model)  # accelerate applies torch.compile to the DDP module
        self._kept_gradients: list[tuple[Tensor, Tensor]] = []
        """Parameters and their gradients from an incomplete step; see `keep_gradients`."""
        self._ended_at_step: int | None = None
        self._outside = {*shared.trained, *_parameters_of(trainer)}.difference(self.model.parameters())
        """Parameters outside the model that compute_loss may train; the engine does not reset their gradients."""
        self._media = {*chain(*from_all_ranks([name for batch in batches for name in media_in(batch.inputs)]))}
        """The keys of inputs with images or audio, such as `pixel_values`, in the first step of any rank."""
        self._donor: Any = None
        """A sample whose inputs have all of these keys; None if microbatches may lack some."""
        self._probed: Probed | None = None
        self.metrics = BatchMetrics(trainer, "train")
        self._step = self._new_step(batches, num_items)
        if self._media and not is_whole(self.model):
            self._find_donor()
        self._rows = rows = trainer.args.per_device_train_batch_size
        if trainer.accelerator.split_batches:
            self._rows = rows = max(1, rows // world_size())
        self.runner = self._new_runner(rows)
        self._check = LossCheck(trainer, self.model, self._collated, self.runner.kind, shared.recovery)
        self._check_token_budget()
        if shared.recovery.enabled or shared.splits_batches:
            self._check_first_step(batches[0], rows)
        if trainer.adaptive.searches:
            self.runner.use_limit(self._search())
        self._step.restore()
        for runner in (self.runner, self._check.runner):
            runner.measure_memory(self.memory)
        if state := trainer.state.stateful_callbacks.get(STATE):
            self.runner.load_state_dict(state)

    def _check_token_budget(self) -> None:
        """Collective: raise a ConfigError if the budget is less than the shortest sample of the first step."""
        limit, samples = self.runner.limit, self._step.samples
        shortest = min(from_all_ranks(min(map(attrgetter("length"), samples))))
        if limit.by_length and not limit.rows_at(shortest):
            raise ConfigError(
                f"token_budget: {self.trainer.adaptive.token_budget} is less than the "
                f"{len(samples[0].row_lengths) * shortest} tokens of the shortest sample of the first step; raise it"
            )

    def _new_step(self, batches: Sequence[CollatedBatch], num_items: Any) -> OneStep:
        return OneStep(batches, num_items, remember_random_state(self.trainer, self._outside))

    def _new_runner(self, rows: int) -> StepRunner[Any]:
        """Collective: return the runner, with the configured token budget or a limit of these rows."""
        samples, budget = self._step.samples, self.trainer.adaptive.token_budget
        twice = self._collated(samples[:1] * 2).inputs
        kind = SampleKind[Any](
            length_of=attrgetter("length"),
            row_lengths_of=attrgetter("row_lengths"),
            filler=lambda _: self._step.filler,
            # otherwise, the collator concatenates
            padded="input_ids" not in twice or len(twice["input_ids"]) > 1,
        )
        return StepRunner(
            self.model,
            self._forward_backward,
            kind=kind,
            limit=TokenLimit(budget, len(samples[0].row_lengths)) if isinstance(budget, int) else RowLimit(rows),
            recovery=self._shared.recovery,
            reduce_once=True,
            on_attempt=self._begin_attempt,
        )

    def run(self, batches: Sequence[CollatedBatch], num_items: Any) -> Tensor:
        """Collective: compute the gradients of a step and return its loss."""
        self._step = step = self._new_step(batches, num_items)
        if isinstance(self._wrapped, DistributedDataParallel) and self._wrapped.will_sync_module_buffers():
            self._wrapped._sync_buffers()  # as DDP does before the first forward of a step
        result = self.runner.run(step.samples, step=self.trainer.state.global_step + 1)
        step.drop_batches()
        self.metrics.end_step(batches=step.batches, mixed=not step.keeps_batches)
        for parameter, gradient in self._kept_gradients:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._kept_gradients.clear()
        self.trainer.state.stateful_callbacks[STATE] = self.runner.state_dict()
        return result.loss_sum / world_size()  # Trainer logs the mean over ranks

    def check_dataset_fills_a_step(self) -> None:
        """Raise a ConfigError if the dataset has ended twice without a complete step in between."""
        step = self.trainer.state.global_step
        if step == self._ended_at_step:
            batches = self.trainer.current_gradient_accumulation_steps, self.trainer.args.gradient_accumulation_steps
            raise ConfigError(
                f"the dataset has {batches[0]} batches per rank, but one step needs {batches[1]}: lower "
                "gradient_accumulation_steps or per_device_train_batch_size"
            )
        self._ended_at_step = step

    def keep_gradients(self) -> None:
        """Keep the gradients of an incomplete step, and add them to those of the next step, as Trainer does."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._kept_gradients.append((parameter, parameter.grad))
                parameter.grad = None

    def to_log(self) -> dict[str, float]:
        """Collective: publish the metrics of TRL's trainers, and return those to log in addition to the loss."""
        self.metrics.publish()
        limit = self.runner.limit
        return {"oom_recoveries": self.runner.recoveries, f"microbatch_{limit.unit}": limit.size}

    def _forward_backward(self, samples: Sequence[RawSample]) -> Totals:
        """Run one microbatch with Trainer's training_step."""
        step, is_filler = self._step, samples[0] is self._step.filler
        if self._probed is not None and samples[0] is self._probed.first:
            samples = self._probed.rows(len(samples))
        kept = step.take(samples)
        batch = self._with_all_media(kept) if kept else self._collated(samples)
        counts = Counts() if is_filler else batch.counts
        weight = 0.0 if is_filler else step.weight(samples, counts, self._check.reduction)
        if not weight:  # without targets, a mean loss is NaN, and NaN * 0 is NaN, so run the filler instead
            batch = self._collated([step.filler])
        if self.runner.limit.by_length:
            batch = batch.without_padding()  # which the limit does not count
        backward = self.trainer.accelerator.backward

        def weighted_backward(loss: Tensor, **kwargs: Any) -> None:
            backward(loss * weight, **kwargs)

        with (
            forgetting_offloaded(self.trainer),
            only_fsdp_communicates(self.trainer, self.model, generated=isinstance(step.samples[0], GeneratedRow)),
            self.metrics.of_microbatch(step.batch_of(samples), counts.rows if weight else 0, batch.inputs),
            override_attributes(self.trainer.accelerator, backward=weighted_backward),
        ):
            loss = Trainer.training_step(self.trainer, self.model, batch.inputs, step.num_items)
        return Totals(loss * weight, counts.labels)

    def _collated(self, samples: Sequence[RawSample]) -> CollatedBatch:
        return self._with_all_media(CollatedBatch.of(samples, self.trainer.keeps_samples))

    def _with_all_media(self, batch: CollatedBatch) -> CollatedBatch:
        """Return the batch. If it lacks a key of `_media`, add a sample that has all of them, without labels.

        Under FSDP2, all ranks must use the same layers, and a batch without images would not use the vision tower.
        """
        if self._donor is None or self._media <= media_in(batch.inputs):
            return batch
        inputs = CollatedBatch.of([*batch.samples, self._donor], self.trainer.keeps_samples).inputs
        inputs["labels"][-1] = IGNORED
        return replace(batch, inputs=inputs)

    def _find_donor(self) -> None:
        """Collective: find a sample that has all keys of `_media`, and that can be added to other microbatches."""
        is_complete = [self._media <= media_in(self._collated([sample]).inputs) for sample in self._step.samples]
        own = self._step.samples[is_complete.index(True)] if any(is_complete) else None
        donors = [own] if all(from_all_ranks(any(is_complete))) else from_all_ranks(own)
        donor = own or next(filter(None, donors), None)
        labels = None if donor is None else self._collated([donor, donor]).inputs.get("labels")
        if isinstance(labels, Tensor) and len(labels) == 2:
            self._donor = donor
        elif not all(from_all_ranks(all(is_complete))):
            raise ConfigError(
                f"some samples have no {' or '.join(sorted(self._media))}, but others have, so ranks would gather "
                "different layers under FSDP2: let the data collator add a blank image or silence, without labels"
            )

    def _begin_attempt(self, _: int, plan: Plan) -> None:
        """Collective: restore the state before an attempt. If it splits batches of the data loader, check the
        loss: after an out-of-memory error, and in the first, second, 4th, 8th and so on of these steps."""
        self._step.restore()
        self.metrics.discard_step()
        if not self._step.begin_attempt(plan, self.runner.limit, self._rows):
            return
        step, last_check, is_first = (
            self.trainer.state.global_step + 1,
            self._check.checked_step,
            self._step.attempts == 1,
        )
        if is_first and not self._check.count_split_step():
            return
        reason = self._find_reduction(splits=True)
        self._step.restore()
        if reason and is_first:
            since = f" (steps {last_check} to {step - 1} may differ from Trainer's)" if last_check else ""
            raise ConfigError(f"in step {step}, {reason}{since}")
        if reason:
            batch = "; set per_device_train_batch_size=1, with more gradient_accumulation_steps"
            raise RecoveryUnsupportedError(
                f"out of memory in step {step}, and {reason}{batch * (reason in UNKNOWN)}",
                *([] if reason in UNKNOWN else [Remedy.SMALLER_LIMIT]),
                Remedy.CHECKPOINT_ACTIVATIONS,
                Remedy.LARGER_BUDGET,
            )

    def _check_first_step(self, batch: CollatedBatch, rows: int) -> None:
        """Collective: find out if a step can be split. If it cannot, train without recovery, like stock Trainer.

        Steps with batches of one row are not split, so only communication in their loss is looked for.
        """
        reproducible = all(from_all_ranks(batch.is_reproducible(self.trainer.keeps_samples)))
        reason = None if reproducible else NOT_REPRODUCIBLE
        if len(set(from_all_ranks(rows))) > 1:  # one rank might split a step while another does not
            reason = "the ranks have batches of different sizes; use equal ones"
        if getattr(self.trainer, "calculate_KL", False):  # which the check of the loss sees only after some steps
            reason = f"KTO's default loss compares samples, {NOT_SPLIT}; for example loss_type='apo_zero_unpaired'"
        if sorting := {"aot", "aot_unpaired"}.intersection(getattr(self.trainer, "loss_types", ())):
            reason = f"DPO's loss {min(sorting)} sorts the samples of a batch, {NOT_SPLIT}"
        if {"sft"} < {*getattr(self.trainer, "loss_types", ())}:
            reason = f"DPO's loss sft is a mean over tokens, and the other losses are means over rows, {NOT_SPLIT}"
        if reason is None and rows > 1:
            reason = self._find_reduction(splits=self._shared.splits_batches)
        elif reason is None and world_size() > 1:
            self._check.compare(self._step.samples, self._step.num_items, self._step.restore, alone=True)
        self.runner.adopt_refusal_of(self._check.runner)
        if reason is None or reason in UNKNOWN:  # the check is repeated before the first attempt that splits batches
            self.runner.recovers &= reason is None  # otherwise, the limit stays until memory runs out
            if reason == UNDECIDED and rank() == 0:
                logger.warning("%s: it is repeated if memory runs out", reason)
            return
        if self._shared.splits_batches:
            raise ConfigError(reason)
        self.runner.recovers, self.runner.cannot_repeat = False, reason
        warn_without_recovery(reason)

    def _find_reduction(self, *, splits: bool) -> str | None:
        """Collective: find out how losses add up. Return None, or the reason why a step cannot be split."""
        known = self._check.reduction
        reason = self._check.find(self._step.samples, self._step.num_items, self._step.restore, splits=splits)
        self.runner.recovers |= reason is None and known is None and self.trainer.adaptive.recover_from_oom
        return reason

    def _search(self) -> Limit:
        """Collective: search for the largest microbatch, and return its limit."""
        if self.memory is None:
            raise ConfigError("a CPU has no memory limit to search within; set memory_limit, for example 4GiB")
        samples, loader, length = (
            self._step.samples,
            self.trainer.callback_handler.train_dataloader,
            attrgetter("length"),
        )
        kept: list[int] = []  # tokens of the longest sample that its collator keeps
        if isinstance(samples[0], GeneratedRow):
            largest = [self.trainer._passes.find_longest(samples[0])]
        elif hasattr(loader.dataset, "__len__"):
            collated = bool(self._media) or any(from_all_ranks(any(each.collated_lengths for each in samples)))
            workers = self.trainer.args.dataloader_num_workers
            indices = indices_of_largest(loader.dataset, loader.collate_fn, workers, collated=collated)
            items = (loader.dataset[index] for index in dict.fromkeys(indices))
            # This collate_fn removes columns that the model does not use, and may truncate.
            batches = [loader.collate_fn([item]) for item in items]
            largest, kept = [each[SAMPLES_KEY].samples[0] for each in batches], row_lengths_in(batches[0])
        else:  # the sizes of a streamed dataset are unknown: use the first step
            largest = [max(from_all_ranks(max(samples, key=length)), key=length)]
        # Measure two candidates: the longest sample with copies of that with the largest images, and only such copies.
        found = min((self._find_rows(first, largest[-1]) for first in largest), key=attrgetter("unrounded_rows"))
        tokens = min(largest[0].length, max(kept, default=largest[0].length))
        if rank() == 0:
            print(search_table(found, tokens), flush=True)
        if isinstance(samples[0], GeneratedRow):
            self.trainer._passes.search(self._training_step(largest[0]))
        if self.trainer.adaptive.token_budget != "auto" or self._media:  # memory is not proportional to tokens
            return RowLimit(found.rows)
        rows_per_sample = len(largest[0].row_lengths)
        return TokenLimit(int(found.unrounded_rows * tokens) * rows_per_sample, rows_per_sample)

    def _find_rows(self, first: RawSample, others: RawSample) -> SearchResult:
        """Collective: search for the most rows of a microbatch that consists of `first` and copies of `others`."""
        first, others = copy.copy(first.with_targets()), others.with_targets()
        # Without padding, transformers may drop the attention mask, and need less memory than in training.
        has_padding = any(from_all_ranks(len({each.length for each in self._step.samples}) > 1))
        has_padding &= not isinstance(first, GeneratedRow)  # which has a masked token
        self._probed = Probed(first, others.shortened(others.length - 1) if has_padding else others, others)
        step, rows = self._training_step(first), len(self._step.samples)
        return find_max_batch_size(step, memory=self.memory, whole_step_rows=rows, max_rows=rows)

    def _training_step(self, sample: RawSample) -> TrainingStep[Any]:
        update, optimizers = (lambda _: self.optimizer.step()), [self.optimizer]
        return TrainingStep(runner=self.runner, sample=sample, update=update, optimizers=optimizers)


def warn_without_recovery(reason: str) -> None:
    """Log on rank 0 why recovery is off."""
    if rank() == 0:
        logger.warning("training continues without recovery, so an out-of-memory error ends it: %s", reason)


@contextmanager
def forgetting_offloaded(trainer: Any) -> Iterator[None]:
    """Within the context, which is that of a microbatch, offload activations if TRL's trainer does. TRL enters its own
    context once per batch, and would keep tensors of a failed pass."""
    context = getattr(trainer, "maybe_activation_offload_context", nullcontext())
    try:
        with context:
            yield
    finally:
        getattr(context, "tracker", {}).clear()


def remember_random_state(trainer: Any, parameters: Iterable[Tensor] = ()) -> Callable[[], None]:
    """Return a function that restores random generators, TRL's counters and the gradients of these parameters."""
    gradients = [(each, each.grad) for each in parameters]  # of an incomplete step, or None
    python, numpy, torch_states = random.getstate(), np.random.get_state(), RngState.capture()
    generator: Any = getattr(trainer.data_collator, "generator", None)  # of a collator with a seed
    drawn = generator.get_state() if isinstance(generator, torch.Generator) else None
    counters = {name: copy.deepcopy(getattr(trainer, name)) for name in COUNTERS if hasattr(trainer, name)}

    def restore() -> None:
        vars(trainer).update(copy.deepcopy(counters))
        random.setstate(python)
        np.random.set_state(numpy)
        torch_states.restore()
        if drawn is not None:
            generator.set_state(drawn)
        for parameter, gradient in gradients:
            parameter.grad = gradient if gradient is None else gradient.clone()

    return restore


def other_models(trainer: Any, trained: Sequence[Tensor]) -> list[nn.Module]:
    """Return the frozen models that the Trainer runs, such as a reference model or a reward model."""
    rewards = dict(enumerate(getattr(trainer, "reward_funcs", None) or ()))
    modules = {name: each for name, each in {**vars(trainer), **rewards}.items() if isinstance(each, nn.Module)}
    models = {name: each for name, each in modules.items() if {*trained}.isdisjoint(each.parameters())}
    for name in models.keys() & {"ref_model", "teacher_model", *rewards}:  # TRL leaves requires_grad set
        models[name].requires_grad_(False)
    return [each for each in models.values() if not any(parameter.requires_grad for parameter in each.parameters())]


def _parameters_of(owner: object) -> Iterator[nn.Parameter]:
    for each in vars(owner).values():
        yield from each.parameters() if isinstance(each, nn.Module) else [each] * isinstance(each, nn.Parameter)


def enforced_memory_limit(
    trainer: Any, models: Iterable[nn.Module], optimizers: Sequence[torch.optim.Optimizer] = ()
) -> AbstractContextManager[MemorySource | None]:
    """Return a context that enforces `memory_limit`, and counts the memory of these models and optimizers."""
    limit = trainer.adaptive.memory_limit
    size = None if limit is None else parse_size(limit, "memory_limit")
    resident = [tensor for each in models for tensor in resident_tensors(each, optimizers)]
    return memory_within(size, trainer.args.device, resident)


def _unwrap_ddp(model: Any, accelerator: Any) -> Any:
    """Return the model without DDP, which would average gradients in every backward instead of once per step."""
    wrapped = getattr(model, "_orig_mod", model)
    if not isinstance(wrapped, DistributedDataParallel):
        return model
    inside = wrapped.module
    return inside if wrapped is model else torch.compile(inside, **accelerator.state.dynamo_plugin.to_kwargs())
