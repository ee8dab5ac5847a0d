"""torchtitan's Trainer with recovery.

torchtitan's `train_step` passes the batches of a step one by one to `forward_backward_step`. An AdaptiveTrainer passes
all rows of a step at once to a StepRunner, which splits them into microbatches and runs torchtitan's own
`forward_backward_step` on each. With `local_batch_size` rows, these are torchtitan's batches. The loss is a sum over
tokens, divided by the number of tokens of the whole step, so it does not depend on how the rows are split.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer

from torchtune_adaptive.arguments import AdaptiveArguments
from torchtune_adaptive.engine.fsdp import FSDPModule
from torchtune_adaptive.engine.ghost import is_fake
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.memory import MemorySource, memory_within, resident_tensors
from torchtune_adaptive.engine.plans import Plan, SampleKind
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size
from torchtune_adaptive.engine.ranks import rank
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import AdaptiveError, ConfigError, RecoveryUnsupportedError, Remedy
from torchtune_adaptive.formatting import parse_size
from torchtune_adaptive.report.tables import search_table

logger = logging.getLogger(__name__)

FILLER = -1
"""In place of the number of a row: the first row of the step, without labels."""
STATE = "adaptive"
"""Name of the limit's state in torchtitan's checkpoints."""
COUNTER = "tokens_per_expert_E"
"""Name of the buffers in which torchtitan's experts count tokens, from one step of the optimizer to the next."""
REMEDIES_AS_FLAGS = {
    Remedy.SHORTER_SAMPLES: "lower --training.seq_len",
    Remedy.CHECKPOINT_ACTIVATIONS: "checkpoint more activations",
    Remedy.MORE_RANKS: "shard the model over more GPUs",
    Remedy.LARGER_BUDGET: "raise --adaptive.memory_limit if it is set",
    Remedy.SMALLER_LIMIT: "lower --training.local_batch_size",
    Remedy.NO_RECOVERY: "pass --adaptive.no-recover-from-oom",
    Remedy.RECOVERY: "remove --adaptive.no-recover-from-oom",
    Remedy.FEWER_ROWS: "remove --adaptive.use_maximum_batch_size",
    Remedy.CAP_MEMORY: "pass --adaptive.memory_limit, for example 8GiB",
}
"""The text of each remedy, expressed as a flag of torchtitan's command line."""


@dataclass(frozen=True)
class TitanArguments(AdaptiveArguments):
    """Arguments of `adaptive`, and flags `--adaptive...` of the command line."""

    token_budget: None = field(default=None, init=False)  # all rows have the same number of tokens


class AdaptiveTrainer(Trainer):
    """torchtitan's Trainer. If any rank runs out of memory, all ranks repeat the step in smaller microbatches."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's config, with the arguments of `adaptive`."""

        adaptive: TitanArguments = field(default_factory=TitanArguments)

    config: Config
    ntokens_seen: int
    gradient_accumulation_steps: int
    runner: StepRunner[int] | None = None
    """None if this training cannot be repeated. torchtitan's own steps then run."""

    def __init__(self, config: Config) -> None:
        """Collective: see torchtitan's Trainer."""
        had_graphs = not config.training.disable_cuda_graphs
        config.training = replace(config.training, disable_cuda_graphs=True)
        super().__init__(config)
        if config.adaptive.searches and config.adaptive.memory_limit is None and self.device.type == "cpu":
            raise ConfigError(f"a CPU has no memory limit to search within; {REMEDIES_AS_FLAGS[Remedy.CAP_MEMORY]}")
        self._batches_per_step, self._searched = self.gradient_accumulation_steps, not config.adaptive.searches
        self._memory: MemorySource | None = None
        self._batch: tuple[dict[str, Tensor], Tensor, Tensor] | None = None
        [model, *other_parts] = self.model_parts
        if self.parallel_dims.pp_enabled or other_parts:
            self._refuse("the schedule of a pipeline runs all microbatches of a step together")
            return
        try:
            recovery = Recovery(
                model,
                enabled=config.adaptive.recover_from_oom,
                exchanges_activations=self.parallel_dims.cp_enabled,
                regrow_after=config.adaptive.regrow_after,
            )
        except RecoveryUnsupportedError as error:
            self._refuse(error.fact)
            return
        seq_len = config.training.seq_len
        self.runner = StepRunner(
            model,
            self._run_microbatch,
            kind=SampleKind(length_of=lambda _: seq_len, filler=lambda _: FILLER),
            limit=RowLimit(config.training.local_batch_size),
            recovery=recovery,
            on_attempt=self._begin_attempt,
        )
        self._counters = [each for name, each in model.named_buffers() if name.endswith(COUNTER)]
        self._losses: list[Tensor] = []
        self._reset_head()
        self._in_step = False  # True while the method below gets all rows of a step
        if self.checkpointer.enable:
            self.checkpointer.states[STATE] = self.runner
            self.checkpointer.dcp_load = partial(self._load, self.checkpointer.dcp_load)
        self.metrics_processor.log = partial(self._log, self.metrics_processor.log)
        if had_graphs and self.device.type == "cuda" and rank() == 0:
            logger.info("CUDA graphs are off: a graph cannot run a smaller microbatch after an out-of-memory error")
        if recovery.enabled and rank() == 0:
            logger.info(
                "steps recover from out-of-memory errors: at most %d rows in a microbatch", self.runner.limit.size
            )

    def _refuse(self, reason: str) -> None:
        """Continue with torchtitan's own steps."""
        if self.runner is not None:
            self.runner.close()
            self.runner = None
        if rank() == 0:
            logger.warning("training continues without recovery, so an out-of-memory error ends it: %s", reason)

    def _load(self, load: Any, states: dict[str, Any], **options: Any) -> None:
        """Collective: load a checkpoint, which has no limit if torchtitan's own Trainer has written it."""
        try:
            load(states, **options)
        except CheckpointException as error:
            if f"{STATE}." not in str(error):
                raise
            states = {name: state for name, state in states.items() if name != STATE}
            load(states, **options)
        if STATE in states and rank() == 0 and states[STATE].limit.size < self.config.training.local_batch_size:
            logger.info("the checkpoint limits microbatches to %d rows", states[STATE].limit.size)

    def _log(self, log: Any, *args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.runner is not None:
            found = {"oom_recoveries": self.runner.recoveries, "microbatch_rows": self.runner.limit.size}
            extra_metrics = {**(extra_metrics or {}), **found}
        log(*args, extra_metrics=extra_metrics, **kwargs)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Collective: see torchtitan's method."""
        if self.runner is None:
            super().train_step(data_iterator)
            return
        batches = [next(data_iterator) for _ in range(self._batches_per_step)]
        if odd := {name for inputs, labels in batches for name in inputs if not _has_rows(inputs[name], labels)}:
            self._refuse(f"the batches cannot be divided by rows, because of {', '.join(sorted(odd))}")
            super().train_step(chain(batches, data_iterator))
            return
        if len(batches) > 1:
            inputs, labels = zip(*batches, strict=True)
            batches = [({name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}, torch.cat(labels))]
        self._in_step, self._called, self.gradient_accumulation_steps = True, False, 1
        try:
            super().train_step(iter(batches))
        finally:
            self._in_step, self.gradient_accumulation_steps = False, self._batches_per_step
        if not self._called:
            self._refuse(f"forward_backward_step of {type(self).__name__} does not call super()")

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """Collective: run forward and backward on all rows of a step. Repeat both until no rank runs out of memory."""
        self._batch, self._called = (input_dict, labels, global_valid_tokens), True
        if self.runner is not None and not self._in_step:
            self._refuse(f"train_step of {type(self).__name__} does not call that of AdaptiveTrainer")
        if self.runner is None:
            return self._forward_backward(*self._batch)
        seen_before, self._counted = self.ntokens_seen, [each.clone() for each in self._counters]
        try:
            with self._measuring():
                if not self._searched:
                    self._search(rows=len(labels))
                self.runner.run(range(len(labels)), step=self.step)
        except AdaptiveError as error:
            error.fact, error.remedies = error.in_words(REMEDIES_AS_FLAGS), ()
            raise
        # without the rows of repeated attempts
        self.ntokens_seen = seen_before + labels.numel() // self.parallel_dims.cp
        self._batch = None
        [loss, *others], self._losses = self._losses, []
        for each in others:
            loss = loss + each
        return loss

    def _forward_backward(self, inputs: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor) -> Tensor:
        """Collective: call torchtitan's method."""
        loss: Tensor = super().forward_backward_step(
            input_dict=inputs, labels=labels, global_valid_tokens=global_valid_tokens
        )
        return loss

    def _begin_attempt(self, step: int, plan: Plan) -> None:
        self._losses.clear()
        for counter, before in zip(self._counters, self._counted, strict=True):
            counter.copy_(before)

    def _run_microbatch(self, rows: Sequence[int]) -> Totals:
        """Collective: run torchtitan's method on these rows."""
        assert self._batch is not None
        (inputs, labels, global_valid_tokens), is_filler = self._batch, rows[0] == FILLER
        first, last = max(0, rows[0]), max(0, rows[-1])
        # a slice does not copy; a probe repeats a row
        part = slice(first, last + 1) if last - first + 1 == len(rows) else [*rows]
        labels = torch.full_like(labels[part], IGNORE_INDEX) if is_filler else labels[part]
        try:
            parts = {name: each[part] for name, each in inputs.items()}
            loss = self._forward_backward(parts, labels, global_valid_tokens)
        except BaseException:
            self._reset_head()
            raise
        if not is_fake(loss):  # as in a ghost pass
            self._losses.append(loss.detach())
        return Totals(torch.zeros(()), 0 if is_filler else len(rows))

    def _reset_head(self) -> None:
        """Set the settings of FSDP that ChunkedLossWrapper changes to those that it leaves after a complete call. They
        differ before the first call and after an error. If they did, microbatches would issue other collectives."""
        if isinstance(head := getattr(self.loss_fn, "lm_head", None), FSDPModule):
            head.set_reshard_after_forward(True)
            head.set_reshard_after_backward(True)
            head.set_requires_gradient_sync(True, recurse=False)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Measure this rank's memory. On a CPU, this is possible only within a limit, which a MemoryMeter enforces."""
        assert self.runner is not None
        if self._memory is not None and self.device.type == "cuda":
            yield
            return
        limit, optimizers = self.config.adaptive.memory_limit, [*self.optimizers]
        budget = None if limit is None else parse_size(limit, "memory_limit")
        resident = [] if limit is None else resident_tensors(self.runner.model, optimizers)
        with memory_within(budget, self.device, resident) as self._memory:
            if self._memory is not None:
                self.runner.measure_memory(self._memory)
            yield

    def _search(self, rows: int) -> None:
        """Collective: search for the largest microbatch. `rows` are those of a step of this rank."""
        assert self.runner is not None
        assert self._memory is not None
        optimizers = [*self.optimizers]
        step = TrainingStep(
            runner=self.runner, sample=0, update=lambda _: self.optimizers.step(), optimizers=optimizers
        )
        found = find_max_batch_size(step, memory=self._memory, whole_step_rows=rows, max_rows=rows)
        self.runner.use_limit(RowLimit(found.rows))
        self._searched = True
        self._losses.clear()
        if rank() == 0:
            logger.info("%s", search_table(found, step.length))


def _has_rows(value: object, labels: Tensor) -> bool:
    """Return True if a value of a batch has an entry for each token, as the labels have."""
    return isinstance(value, Tensor) and value.shape[:2] == labels.shape


def adaptive(config: Any, **arguments: Any) -> AdaptiveTrainer.Config:
    """Return the same config, which builds an AdaptiveTrainer. `arguments` are fields of TitanArguments."""
    if isinstance(config, AdaptiveTrainer.Config):
        return replace(config, adaptive=config.adaptive.changed(**arguments))
    if type(config) is not Trainer.Config:
        raise TypeError(
            f"adaptive() got a {type(config).__qualname__}: pass a Trainer.Config, or derive your Trainer from "
            "AdaptiveTrainer"
        )
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    return AdaptiveTrainer.Config(**values, adaptive=TitanArguments().changed(**arguments))
