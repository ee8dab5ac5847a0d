"""The optimizer steps of one `Trainer.train()`: each goes through the engine, which splits it as memory allows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from torchtune_adaptive.engine.fsdp import FSDPModule
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit
from torchtune_adaptive.engine.memory import CudaMemory, MemorySource
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size, profile_memory
from torchtune_adaptive.engine.ranks import from_all_ranks, rank, world_size
from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.engine.step import Recovery, StepRunner
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.hf.samples import CollatedBatch, RawSample, collated, sample_kind
from torchtune_adaptive.report.tables import profile_table, search_table
from torchtune_adaptive.text import parse_size

STATE = "adaptive"
"""The key of the limit in `trainer_state.json`, under `stateful_callbacks`."""
COUNTED = ("_metrics", "_total_train_tokens")
"""What compute_loss of TRL's trainers adds to: a repeated step must not count twice."""
NEXT_TO_NOTHING = 0.02
"""Share of a loss by which bf16 may miss what the losses of its parts add up to."""


class OptimizerSteps:
    """Runs the samples of each step, beginning with the given ones."""

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        microbatch: Callable[..., Tensor],
        batches: Sequence[CollatedBatch],
        num_items: Any,
    ) -> None:
        """Collective: after the model is prepared and a checkpoint is loaded. `microbatch` is the Trainer's own
        `training_step`."""
        self.trainer, self.microbatch = trainer, microbatch
        # Inside DDP, whose hooks would average in every backward: the runner does so once the step has succeeded.
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._begin(batches, num_items)
        self.adds_up, padded = self._how_losses_add_up(batches)
        frozen = self._models_beside()
        adaptive, before = trainer.adaptive, self._counted()
        self.runner = StepRunner(
            self.model,
            self._forward_backward,
            kind=sample_kind(padded=padded),
            limit=self._configured_limit(),
            recovery=Recovery(
                self.model,
                *frozen,
                enabled=adaptive.recover_from_oom,
                regrow_after=adaptive.regrow_after,
                on_attempt=lambda *_: self._count_again(),
            ),
        )
        self.memory = self._memory_with(self.model, *frozen)
        if adaptive.use_maximum_batch_size or adaptive.token_budget == "auto":
            with self._metering():
                self.runner.use_limit(self._measured_limit())
            self._count_again(before)
        self.runner.watch(self.memory)
        if state := trainer.state.stateful_callbacks.get(STATE):
            self.runner.load_state_dict(state)

    def run(self, batches: Sequence[CollatedBatch], num_items: Any) -> Tensor:
        """Collective: the loss of a step, whose gradients are complete."""
        self._begin(batches, num_items)
        with self._metering():
            result = self.runner.run(self._samples, step=self.trainer.state.global_step + 1)
        self._batches.clear()
        self.trainer.state.stateful_callbacks[STATE] = self.runner.state_dict()
        return result.loss_sum / world_size()  # Trainer logs the mean over ranks

    def metrics(self) -> dict[str, float]:
        """Collective: what to log beside the loss. Brings what TRL has counted on each rank to the mean over ranks."""
        counted = getattr(self.trainer, "_metrics", {}).get("train", {})
        means = from_all_ranks({name: sum(values) / len(values) for name, values in counted.items() if values})
        for name in counted:
            held = [each[name] for each in means if name in each]
            counted[name] = [sum(held) / len(held)] if held else []
        limit = self.runner.limit
        return {"oom_recoveries": self.runner.recoveries, f"microbatch_{limit.unit}": limit.size}

    def _begin(self, batches: Sequence[CollatedBatch], num_items: Any) -> None:
        self._samples = [sample for batch in batches for sample in batch.samples]
        # A microbatch that is just one of them is run as the data loader has collated it.
        self._batches: dict[tuple[int, ...], CollatedBatch] = {tuple(map(id, each.samples)): each for each in batches}
        self._targets, self._num_items = sum(batch.targets for batch in batches), num_items
        self._before = self._counted()

    def _forward_backward(self, samples: Sequence[RawSample]) -> Totals:
        """One microbatch, by the Trainer's own training_step."""
        batch = self._batches.get(tuple(map(id, samples))) or collated(self.trainer.data_collator, samples)
        counts, backward = samples[0].counts, self.trainer.accelerator.backward
        weight = self._weight(len(samples), batch.targets) if counts else 0.0

        def weighted_backward(loss: Tensor, **kwargs: Any) -> None:
            backward(loss * weight, **kwargs)

        with self._alone(), patch.object(self.trainer.accelerator, "backward", weighted_backward):
            loss = self.microbatch(self.model, batch.inputs, self._num_items)
        return Totals(loss * weight, batch.targets if counts else 0)

    def _weight(self, rows: int, targets: int) -> float:
        """What a mean over a microbatch is multiplied by, so that those of a step add up to what Trainer makes of its
        batches: their sum, which it divides by their number."""
        batches: int = self.trainer.current_gradient_accumulation_steps
        if self.adds_up == "mean of rows":
            return batches * rows / len(self._samples)
        return batches * targets / max(1, self._targets) if self.adds_up == "mean of tokens" else 1.0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps what TRL communicates besides FSDP out of a microbatch, since a rank that has failed cannot take part.

        Its compute_loss gathers metrics: every rank takes the others' for its own, and `metrics` has the mean. Its head
        reads a weight past FSDP's hooks: one that is frozen in a group of its own is gathered before.
        """
        if world_size() == 1:
            yield
            return
        accelerator, head = self.trainer.accelerator, self._head()

        def repeated(value: Any, *_: Any, **__: Any) -> Any:
            return recursively_apply(lambda tensor: torch.cat([torch.atleast_1d(tensor)] * world_size()), value)

        if head is not None:
            head.unshard()
        with patch.multiple(accelerator, gather=repeated, gather_for_metrics=repeated):
            yield
        if head is not None:
            head.reshard()

    def _head(self) -> FSDPModule | None:
        model = self.trainer.accelerator.unwrap_model(self.model)
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        frozen = head is not None and not head.weight.requires_grad
        return head if frozen and isinstance(head, FSDPModule) else None

    def _how_losses_add_up(self, batches: Sequence[CollatedBatch]) -> tuple[str, bool]:
        """Collective: how the loss of two samples follows from those of each, and whether rows are padded.

        It is tried out, since Trainer cannot know: a model may take `num_items_in_batch` and ignore it.
        """
        first, collate = batches[0], self.trainer.data_collator
        same = _same(first.inputs, collated(collate, first.samples).inputs)
        ordered = sorted(self._samples, key=lambda sample: sample.length)
        one = ordered[0]
        other = next((each for each in ordered if each.length > one.length), ordered[-1])
        tried = [collated(collate, some) for some in ([one, other], [one], [other])]
        padded = "input_ids" not in tried[0].inputs or len(tried[0].inputs["input_ids"]) > 1
        both, *parts = map(self._loss_of, tried)
        targets = [batch.targets for batch in tried[1:]]
        sums = {
            "sum": sum(parts),
            "mean of tokens": sum(map(float.__mul__, parts, map(float, targets))) / max(1, sum(targets)),
            "mean of rows": sum(parts) / 2,
        }
        told = from_all_ranks((same, both, {name: abs(value - both) for name, value in sums.items()}))
        if not all(same for same, *_ in told):
            raise ConfigError(
                "the data collator returns another batch when it collates the same samples again (for example, masks "
                "drawn at random), so a step cannot be split anew; draw them in the dataset"
            )
        errors = {name: max(error[name] / (abs(loss) or 1.0) for _, loss, error in told) for name in sums}
        how = min(errors, key=lambda name: errors[name])
        if errors[how] > NEXT_TO_NOTHING:
            raise ConfigError(
                f"the loss of two samples is {both:.4g}, that of each {parts[0]:.4g} and {parts[1]:.4g}: neither their "
                "sum nor their mean, so a step cannot be split; use a loss that is a sum or a mean over rows or tokens"
            )
        return how, padded

    def _loss_of(self, batch: CollatedBatch) -> float:
        """Collective: without a backward, and without a trace."""
        trainer, training, before = self.trainer, self.model.training, self._counted()
        self.model.eval()
        try:
            with torch.no_grad(), self._alone(), trainer.compute_loss_context_manager():
                inputs = trainer._prepare_inputs(batch.inputs)
                return float(trainer.compute_loss(self.model, inputs, num_items_in_batch=self._num_items))
        finally:
            self.model.train(training)
            self._count_again(before)

    def _models_beside(self) -> list[nn.Module]:
        """Models that the Trainer runs and never trains, such as the reference of DPO. TRL leaves them unfrozen."""
        trained = {id(each) for group in self.trainer.optimizer.param_groups for each in group["params"]}
        modules = [each for each in vars(self.trainer).values() if isinstance(each, nn.Module)]
        return [
            each.requires_grad_(False)
            for each in modules
            if not any(id(parameter) in trained for parameter in each.parameters())
        ]

    def _counted(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self.trainer, name)) for name in COUNTED if hasattr(self.trainer, name)}

    def _count_again(self, before: dict[str, Any] | None = None) -> None:
        vars(self.trainer).update(copy.deepcopy(self._before if before is None else before))

    def _configured_limit(self) -> Limit:
        budget = self.trainer.adaptive.token_budget
        if isinstance(budget, int):
            return TokenLimit(budget, rows_per_sample=len(self._samples[0].row_lengths))
        return RowLimit(self.trainer.args.per_device_train_batch_size)

    def _measured_limit(self) -> Limit:
        """Collective: what fits of the longest sample, measured in steps that leave no trace."""
        if self.memory is None:
            raise ConfigError("a CPU has no memory limit to search within; set memory_limit, for example 4GiB")
        most_rows, max_norm = len(self._samples), self.trainer.args.max_grad_norm or float("inf")

        def update(_: object) -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            self._optimizer.step()

        step = TrainingStep(
            runner=self.runner,
            sample=self._longest_sample().as_targets(),
            cut=RawSample.cut,
            shortest=4,
            update=update,
            optimizers=[self._optimizer],
        )
        limit: Limit
        if self.trainer.adaptive.token_budget == "auto":
            profile = profile_memory(step, memory=self.memory, most_rows=most_rows)
            table, limit = profile_table(profile), profile.limit
        else:
            found = find_max_batch_size(
                step, memory=self.memory, samples_per_step=most_rows, whole_step_rows=most_rows, max_rows=most_rows
            )
            table, limit = search_table(found, step.length), RowLimit(found.rows)
        if rank() == 0:
            print(table, flush=True)
        return limit

    def _longest_sample(self) -> RawSample:
        """Collective: that of the dataset; of one that is only iterated over, that of the first step."""
        dataset, by_length = self.trainer.callback_handler.train_dataloader.dataset, attrgetter("length")
        if hasattr(dataset, "__len__"):
            return max((RawSample(dataset[index]) for index in range(len(dataset))), key=by_length)
        return max(from_all_ranks(max(self._samples, key=by_length)), key=by_length)

    def _memory_with(self, *models: nn.Module) -> MemorySource | None:
        limit = self.trainer.adaptive.memory_limit
        size = None if limit is None else parse_size(limit, "memory_limit")
        if self.trainer.args.device.type == "cuda":
            return CudaMemory(size)
        if size is None:
            return None
        if size.is_fraction:
            raise ConfigError(f"memory_limit: {limit} is a share of a GPU; on a CPU give an amount, for example 4GiB")
        meter = MemoryMeter(int(size.amount))
        meter.count(tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
        return meter

    def _metering(self) -> AbstractContextManager[object]:
        """On a CPU, the limit is in force during a step, beside the optimizer's state."""
        if not isinstance(self.memory, MemoryMeter):
            return nullcontext()
        states = self._optimizer.state.values()
        self.memory.count(value for state in states for value in state.values() if isinstance(value, Tensor))
        return self.memory

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's."""
        optimizer: torch.optim.Optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        return optimizer


def _same(inputs: Any, again: Any) -> bool:
    return all(torch.equal(value.cpu(), again[name]) for name, value in inputs.items() if isinstance(value, Tensor))
