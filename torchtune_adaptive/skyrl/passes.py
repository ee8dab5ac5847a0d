"""The passes of a worker: training, forward, and forward with a loss. Each has its own limit of a microbatch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import skyrl.backends.skyrl_train.workers.worker as skyrl_worker
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.backends.skyrl_train.workers.worker_utils import BaseBatchIterator, TokenBasedBatchIterator
from skyrl.train.dataset.bin_packing import make_seq_packer
from torch import Tensor

from torchtune_adaptive.contexts import override_attributes
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit
from torchtune_adaptive.engine.memory import MemorySource, memory_within, resident_tensors
from torchtune_adaptive.engine.plans import Plan, SampleKind
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size
from torchtune_adaptive.engine.ranks import rank
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import ConfigError, Remedy
from torchtune_adaptive.formatting import parse_size
from torchtune_adaptive.report.tables import search_table

logger = logging.getLogger(__name__)

TRAIN, FORWARD, WITH_LOSS = "forward_backward", "forward", "forward with a loss"
ROW_KEYS = {TRAIN: "micro_train_batch_size_per_gpu", FORWARD: "micro_forward_batch_size_per_gpu"}
ROW_KEYS[WITH_LOSS] = ROW_KEYS[FORWARD]
"""The key of SkyRL's config that limits the rows of a microbatch, by stage."""
FILLER = -1
"""In place of the index of a row: padding."""
SELECT_TOKENS = ("clip_cov", "kl_cov")
"""Values of `policy_loss_type` whose losses select some tokens of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class RowKind(SampleKind[int]):
    """The rows of a batch. Under a limit by tokens without padding, SkyRL's own packer plans the microbatches."""

    wholes: Callable[[], Plan]
    """Returns the microbatches of which all others must be parts; none if microbatches may have any rows."""

    def plan(self, lengths: Sequence[int], limit: Limit) -> Plan:
        """Return SkyRL's microbatches under this limit, or of each whole."""
        wholes = self.wholes() or (tuple(range(len(lengths))),)
        parts = ((rows, part) for rows in wholes for part in self._pack([lengths[row] for row in rows], limit))
        return tuple(tuple(rows[index] for index in part) for rows, part in parts)

    def _pack(self, lengths: list[int], limit: Limit) -> Plan:
        if self.padded or not limit.by_length:
            return super().plan(lengths, limit)
        return tuple(map(tuple, make_seq_packer("balanced", bin_capacity=limit.size).pack(lengths)))

    def spread(self, plan: Plan, lengths: Sequence[int], limit: Limit, microbatches: int) -> Plan:
        """Add microbatches of padding, as SkyRL does."""
        return (*plan, *[()] * (microbatches - len(plan)))


class CompletedBatches(TokenBasedBatchIterator):
    """Microbatches that have run. SkyRL's loop iterates over them, and restores the order of the rows."""

    def __init__(self, data: TrainingInputBatch, plan: Plan = ()) -> None:
        BaseBatchIterator.__init__(self, data)
        self._microbatches = [rows for rows in plan if rows]
        self._num_padding_microbatches = len(plan) - len(self._microbatches)
        self._token_counts = range(len(data))

    def of_rows(self, rows: Sequence[int]) -> TrainingInputBatch:
        """Return a microbatch of these rows, or of a filler. SkyRL's has no images, which all ranks must have."""
        if rows[0] != FILLER:
            return self._create_microbatch_from_indices(rows)
        if self.data.get("pixel_values") is None:
            return self._create_padding_microbatch()
        batch = self._create_microbatch_from_indices([0])
        for name in {"loss_mask", "advantages"} & batch.keys():
            batch[name] = torch.zeros_like(batch[name])
        return batch

    def __iter__(self) -> Iterator[TrainingInputBatch]:
        for rows in (*self._microbatches, *[(0,)] * self._num_padding_microbatches):
            batch = TrainingInputBatch({"sequences": self.data["sequences"][: len(rows)]})  # its results are known
            batch.metadata = self.data.metadata
            yield batch


class WorkerPasses:
    """Runs the passes of one worker."""

    def __init__(self, worker: Any, arguments: Any) -> None:
        """Collective: the worker's model must be sharded."""
        if worker.sequence_parallel_size > 1:
            raise ConfigError(
                f"sequence_parallel_size is {worker.sequence_parallel_size}, and ranks that exchange activations "
                "cannot repeat a batch: set it to 1, or use SkyRL's own worker"
            )
        self._worker, self._cfg, self._arguments = worker, worker.cfg, arguments
        self._model = worker.model.model if isinstance(worker.model, HFModelWrapper) else worker.model
        self._optimizers = [worker.optimizer] if worker.optimizer else []
        self._is_critic = hasattr(worker, "_micro_batches_accumulated")
        options = {"enabled": arguments.recover_from_oom, "regrow_after": arguments.regrow_after}
        self._recovery = Recovery(self._model, **options)
        self.runners: dict[str, StepRunner[int]] = {}
        """The runner of each stage that has run."""
        self._limits: dict[str, Limit] = {}
        """The limit of each stage before any recovery."""
        self._memory: MemorySource | None = None
        """That of the latest batch."""
        self.calls, self._warned = 0, False
        self._earlier: list[tuple[Tensor, Tensor]] = []
        """Parameters, and the gradients of earlier batches, on the host."""
        self.plan: Plan = ()
        """The rows of each microbatch in the latest attempt."""
        if isinstance(arguments.token_budget, int):
            self._cfg.max_tokens_per_microbatch = arguments.token_budget

    def run(self, stage: str, name: str, method: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: run the microbatches of a batch by SkyRL's method called `name`. Then call SkyRL's `method` for
        the whole batch, which gets their results."""
        run_micro, memory_limit = getattr(self._worker, name), self._arguments.memory_limit
        if not len(data):
            return method(data, *args, **kwargs)
        self._run_micro = lambda *inputs: run_micro(*inputs, *args, **kwargs)
        self._combine = partial(self._combine_results, name, partial(method, data, *args, **kwargs))
        # a method of the user may communicate, so it must not run inside an attempt
        self._combines_inside = method.__module__.startswith("skyrl.")
        self._loss = (args[0] if args else kwargs.get("loss_fn")) or self._cfg.algorithm.policy_loss_type
        budget = None if memory_limit is None else parse_size(memory_limit, "memory_limit")
        resident, device = resident_tensors(self._model, self._optimizers), torch.device(torch.cuda.current_device())
        gradients = self._adding_gradients() if stage == TRAIN else self._without_gradients()
        with gradients, memory_within(budget, device, resident, self._memory) as memory:
            self._memory = memory
            if stage not in self._limits:  # also after a failed search
                self._limits[stage] = self._create_runner(stage, data, memory)
            runner = self.runners[stage]
            runner.measure_memory(memory)
            self._begin(stage, data, self._limits[stage])
            self.calls += 1
            runner.run(range(len(data)), step=self.calls)
        if not self._combines_inside:
            self._combine()
        output, reduce_metrics = self._output
        output.metrics.update(reduce_metrics(output.metrics))
        if self._counts_microbatches:  # optim_step divides gradients by this number
            self._worker._micro_batches_accumulated += len(self._configured)
        if stage == TRAIN:
            limit = runner.limit
            output.metrics.update({"oom_recoveries": runner.recoveries, f"microbatch_{limit.unit}": limit.size})
        return output

    def _combine_results(self, name: str, method: Callable[[], Any]) -> None:
        """Let SkyRL's method combine the results of the microbatches, except for the reduction over ranks, in which
        peers would wait for a rank that has run out of memory."""
        completed, results = CompletedBatches(self._batches.data, self.plan), iter(self._results)
        iterators = dict.fromkeys(("get_microbatch_iterator", "BatchIterator"), lambda *_, **__: completed)
        reductions: list[Callable[[Any], Any]] = []
        reduce_metrics = skyrl_worker.all_reduce_metrics

        def reduce_later(metrics: Any, *args: Any, **kwargs: Any) -> Any:
            reductions.append(lambda metrics: reduce_metrics(metrics, *args, **kwargs))
            return metrics

        later = {"all_reduce_metrics": reduce_later} if self._combines_inside else {}
        of_worker: dict[str, Any] = {name: lambda *_, **__: next(results)}
        if self._is_critic:  # which counts the microbatches
            of_worker["_micro_batches_accumulated"] = 0
        with (
            override_attributes(skyrl_worker, **iterators, **later),
            override_attributes(self._worker, **of_worker),
        ):
            output = method()
        assert not [*results], "SkyRL's method must use the results of all microbatches"
        self._output = output, reductions[0] if reductions else dict

    def _create_runner(self, stage: str, data: TrainingInputBatch, memory: MemorySource | None) -> Limit:
        """Collective: create the runner of a stage. If configured, search for its limit, which is returned."""
        cfg, budget = self._cfg, self._arguments.token_budget
        counts_tokens = stage != WITH_LOSS and (budget is not None or cfg.max_tokens_per_microbatch > 0)
        kind = RowKind(
            length_of=lambda row: self._lengths[row],
            filler=lambda _: FILLER,
            # SkyRL's key counts tokens without padding, although all rows of a batch are padded to the same length
            padded=not (cfg.remove_microbatch_padding or (counts_tokens and budget is None)),
            wholes=lambda: self._wholes,
        )
        limit: Limit = RowLimit(getattr(cfg, ROW_KEYS[stage]))
        if counts_tokens and budget != "auto":
            limit = TokenLimit(cfg.max_tokens_per_microbatch)
        options: dict[str, Any] = {"limit": limit, "recovery": self._recovery, "stage": stage}
        options["on_attempt"] = partial(self._begin_attempt, stage)
        options["adds_gradients"] = stage == TRAIN
        options["finish"] = lambda: self._combine() if self._combines_inside else None
        if stage not in self.runners:
            self.runners[stage] = StepRunner(self._model, self._run_microbatch, kind=kind, **options)
        if self._arguments.searches:
            limit = self._search(stage, data, memory, by_tokens=counts_tokens and budget == "auto")
            self.runners[stage].use_limit(limit)
        return limit

    def _begin(self, stage: str, data: TrainingInputBatch, limit: Limit) -> None:
        """Prepare for the rows of this batch, whose configured limit is given."""
        kind = self.runners[stage].kind
        self._stage, self._batches, self._results = stage, CompletedBatches(data), list[Any]()
        self._lengths = data["attention_mask"].sum(1).tolist()
        if kind.padded:
            self._lengths = [data["sequences"].shape[1]] * len(data)
        self._wholes: Plan = ()
        self._configured = kind.plan(self._lengths, limit)
        by_rows, trains_policy = self._cfg.max_tokens_per_microbatch <= 0, stage == TRAIN and not self._is_critic
        self._counts_microbatches = stage == TRAIN and self._is_critic and by_rows
        self._has_entropy = trains_policy and self._cfg.algorithm.use_entropy_loss and self._loss != "cross_entropy"
        self._targets = data["loss_mask"].sum(1).tolist() if self._has_entropy else []
        if self._counts_microbatches or self._has_entropy:  # the loss of a row depends on its microbatch
            self._wholes = self._configured

    def _begin_attempt(self, stage: str, step: int, plan: Plan) -> None:
        """Discard the results of a failed attempt. Warn once about losses that select tokens of a microbatch."""
        self.plan, self._results = plan, []
        self._restore_gradients()
        split = any(rows and rows not in self._configured for rows in plan)
        if split and self._loss in SELECT_TOKENS and stage == TRAIN and not (self._is_critic or self._warned):
            self._warned = True
            if rank() == 0:
                logger.warning(
                    "the loss %s (trainer.algorithm.policy_loss_type) selects tokens of a microbatch, so a step that "
                    "is repeated in smaller microbatches trains on other tokens",
                    self._loss,
                )

    def _run_microbatch(self, rows: Sequence[int]) -> Totals:
        """Run one microbatch by SkyRL's method, and keep its result."""
        batch, whole = self._batches.of_rows(rows), self._batches.data
        weight = len(batch) / len(whole)
        if self._counts_microbatches:  # the sum over microbatches is divided by their configured number
            weight = len(batch) / len(self._whole_of(rows))
        inputs = batch if self._stage == FORWARD else BaseBatchIterator.batch_to_experience(batch)
        with self._entropy_in_proportion(rows):
            result = self._run_micro(inputs, weight) if self._stage == TRAIN else self._run_micro(inputs)
        if self._counts_microbatches:
            result["critic_loss"] /= weight
        self._results.append(result)
        return Totals(torch.zeros(()), 0 if rows[0] == FILLER else len(rows))

    def _whole_of(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the rows of the configured microbatch of which these rows are a part."""
        return next((whole for whole in self._configured if rows[0] in whole), rows)

    def _entropy_in_proportion(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Scale the entropy bonus, which SkyRL weights by rows, so that it adds up over parts of a microbatch."""
        whole = self._whole_of(rows)
        if not self._has_entropy or len(whole) == len(rows):
            return nullcontext()
        algorithm = self._cfg.algorithm
        targets, of_whole = (sum(self._targets[row] for row in each) for each in (rows, whole))
        factor = targets / (of_whole or 1) * len(whole) / len(rows)
        return override_attributes(algorithm, entropy_loss_coef=algorithm.entropy_loss_coef * factor)

    @contextmanager
    def _adding_gradients(self) -> Iterator[None]:
        """Add to the gradients of earlier batches, as SkyRL does. Copies on the host restore them after an error."""
        with_gradients = (each for each in self._model.parameters() if each.grad is not None)
        if self._recovery.enabled:
            self._earlier = [(each, _local(each.grad).to("cpu", copy=True)) for each in with_gradients]
        try:
            yield
        except BaseException:
            if self._recovery.enabled:
                self._model.zero_grad(set_to_none=True)
                self._restore_gradients()
            raise
        finally:
            self._earlier = []

    def _restore_gradients(self) -> None:
        """Restore the gradients of earlier batches, if they have been dropped."""
        for parameter, gradient in self._earlier:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                _local(parameter.grad).copy_(gradient)

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Within the context, set the gradients of earlier batches aside."""
        kept = [(each, each.grad) for each in self._model.parameters() if each.grad is not None]
        self._model.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            self._model.zero_grad(set_to_none=True)
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _search(self, stage: str, data: Any, memory: MemorySource | None, *, by_tokens: bool) -> Limit:
        """Collective: search for the largest microbatch of the longest sequences, and return its limit."""
        if memory is None:
            raise ConfigError("a CPU has no memory limit to search within", Remedy.CAP_MEMORY)
        runner, optimizers, rows = self.runners[stage], self._optimizers if stage == TRAIN else [], len(data)
        longest = longest_row(data, self._arguments, padded=not self._cfg.remove_microbatch_padding)
        self._begin(stage, longest, runner.limit)
        update = (lambda _: optimizers[0].step()) if optimizers else None
        step = TrainingStep(runner=runner, sample=0, update=update, optimizers=optimizers)
        with self._without_gradients():
            found = find_max_batch_size(step, memory=memory, whole_step_rows=rows, max_rows=rows)
        limit: Limit = TokenLimit(int(found.unrounded_rows * step.length)) if by_tokens else RowLimit(found.rows)
        key = "max_tokens_per_microbatch" if by_tokens else ROW_KEYS[stage]
        setattr(self._cfg, key, limit.size)
        shown = f"trainer.{key}={limit.size}"
        if by_tokens and runner.kind.padded:  # SkyRL's key does not count padding
            shown = f"token_budget={limit.size} (padding included)"
        if rank() == 0:
            logger.info("%s\n%s: %s fits", search_table(found, step.length, stage), stage, shown)
        return limit


def longest_row(data: TrainingInputBatch, arguments: Any, *, padded: bool) -> TrainingInputBatch:
    """Return the first row of a batch, or that with the largest images, extended to the longest prompt and answer.

    All tokens of the answer are targets. If rows are `padded`, one token of the prompt is masked, because attention may
    need less memory without a mask.
    """
    width, answer, images = data["sequences"].shape[1], data.metadata["response_length"], data.get("pixel_values")
    before, after = arguments.max_prompt_length - (width - answer), max(0, arguments.max_generate_length - answer)
    chosen = 0 if images is None else max(range(len(data)), key=lambda row: images[row].numel())

    def extended(name: str, value: Any) -> Any:
        row = None if value is None else value[torch.tensor([chosen])]
        if not isinstance(row, Tensor) or row.dim() != 2 or row.shape[1] not in (width, answer):
            return row  # images, for example
        start, end = -max(0, before) if row.shape[1] == width else 0, row.shape[1] + after
        row = row[:, torch.arange(start, end).clamp(0, row.shape[1] - 1)]  # repeats the first and the last token
        return torch.ones_like(row) if name.endswith("_mask") else row

    longest = TrainingInputBatch({name: extended(name, value) for name, value in data.items()})
    longest["attention_mask"][:, : int(padded)] = 0
    longest.metadata = {**data.metadata, "response_length": answer + after}
    return longest


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.detach()
