"""Recovery in `evaluate` and `predict`: after an out-of-memory error, all ranks repeat the batch in smaller pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_pt_utils import nested_concat

from torchtune_adaptive.contexts import override_attributes
from torchtune_adaptive.engine.fsdp import is_whole
from torchtune_adaptive.engine.limit_policy import LimitState
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import ConfigError, RecoveryUnsupportedError
from torchtune_adaptive.hf.losses import (
    CHECK_FAILED,
    BatchLoss,
    Look,
    Reduction,
    TwoSamples,
    find_reduction,
    losses_of_groups,
    noise_in,
)
from torchtune_adaptive.hf.metrics import BatchMetrics, only_fsdp_communicates
from torchtune_adaptive.hf.samples import SAMPLES_KEY, CollatedBatch, Counts, KeepSamples, counts_of, media_in
from torchtune_adaptive.hf.steps import (
    enforced_memory_limit,
    other_models,
    remember_random_state,
)

EVALUATION = "evaluation"
"""The name of the stage."""
CANNOT_SPLIT = "out of memory in evaluation, and the batch cannot be split"
REMEDY = "lower per_device_eval_batch_size"


class Piece(NamedTuple):
    """The results of `prediction_step` for some rows of a batch."""

    loss: BatchLoss
    outputs: tuple[Any, Any]
    """Logits and labels."""


class Evaluator:
    """Runs the `prediction_step` of a Trainer for each batch of an evaluation, as a stage without a backward pass."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._runner: StepRunner[int] | None = None
        self._limit: LimitState | None = None
        self._reduction: Reduction | None = None
        self._batches_run = 0
        self._metrics = BatchMetrics(trainer, "eval")

    @contextmanager
    def keeping_samples(self, dataloader: Any) -> Iterator[None]:
        """Collective: within the context, add the samples to the dataloader's batches, if evaluation can recover."""
        trainer, loader = self.trainer, getattr(dataloader, "base_dataloader", dataloader)
        dispatches, several = isinstance(dataloader, DataLoaderDispatcher), trainer.accelerator.num_processes > 1
        generates = type(trainer)._prepare_inputs is not Trainer._prepare_inputs
        equal_batches = not several or (trainer.accelerator.even_batches and not dispatches)
        if not (trainer.adaptive.recover_from_oom and isinstance(loader, DataLoader) and equal_batches) or generates:
            yield
            return
        self._collate, self._preprocess = KeepSamples(loader.collate_fn), trainer.preprocess_logits_for_metrics
        with ExitStack() as self._evaluation_stack:
            self._evaluation_stack.enter_context(override_attributes(loader, collate_fn=self._collate))
            restored = override_attributes(trainer, preprocess_logits_for_metrics=self._preprocess)
            self._evaluation_stack.enter_context(restored)
            yield
            self._metrics.publish()

    def close(self) -> None:
        """Delete the runner, because its recovery ends now, but keep its limit for the next evaluation."""
        if self._runner is not None:
            self._limit, self._runner = self._runner.state_dict(), None

    def to_log(self) -> dict[str, float]:
        """Return the number of recoveries of all evaluations, if there were any."""
        recoveries = self._runner.recoveries if self._runner else self._limit["recoveries"] if self._limit else 0
        return {f"oom_recoveries/{EVALUATION}": recoveries} if recoveries else {}

    def predict(self, model: nn.Module, inputs: Any, prediction_step: Callable[[Any], tuple[Any, Any, Any]]) -> Any:
        """Collective: return the results of `prediction_step`. If any rank runs out of memory, split the batch."""
        batch: CollatedBatch | None = inputs.pop(SAMPLES_KEY, None) if isinstance(inputs, MutableMapping) else None
        generates = getattr(self.trainer.args, "predict_with_generate", False) and not is_whole(model)
        has_gradients = any(parameter.grad is not None for parameter in model.parameters())
        if batch is None or generates or has_gradients or not (runner := self._prepare_runner(model, batch)):
            return prediction_step(inputs)
        self.trainer.preprocess_logits_for_metrics = self._preprocess
        self._model, self._inputs, self._samples, self._prediction_step = model, inputs, batch.samples, prediction_step
        # This may be a collective of Trainer, which must not run inside the pass, so call it here.
        self._items = self.trainer._get_num_items_in_batch([inputs], self.trainer.args.device)
        self._restore, self._batches_run = remember_random_state(self.trainer), self._batches_run + 1
        self._pieces: list[Piece] = []
        try:
            runner.run(range(len(batch.samples)), step=self._batches_run)
            self._metrics.end_step()
            first, *others = self._pieces
            if not others:
                return first.loss.loss, *first.outputs
            loss = self._loss([each.loss for each in self._pieces])
            pieces = [*map(self._preprocess_piece, self._pieces)]
            self.trainer.preprocess_logits_for_metrics = lambda logits, _: logits  # already called for each piece
            return loss, *(self._concatenate(pieces, index) for index in (0, 1))
        finally:
            del self._inputs, self._samples, self._prediction_step, self._pieces

    def _begin_attempt(self, *_: object) -> None:
        """Delete the pieces of a failed attempt, and restore random generators and counters."""
        self._pieces.clear()
        self._metrics.discard_step()
        self._restore()

    def _prepare_runner(self, model: nn.Module, batch: CollatedBatch) -> StepRunner[int] | None:
        """Collective: create the runner if there is none. Return None if passes of this model cannot be repeated."""
        trainer = self.trainer
        if self._runner is not None:
            return self._runner
        if (shared := trainer._shared) is not None:
            model, recovery, memory = shared.model, shared.recovery, shared.memory
        else:
            models, regrow_after = [model, *other_models(trainer, [*model.parameters()])], trainer.adaptive.regrow_after
            try:
                recovery = Recovery(*models, regrow_after=regrow_after)
            except RecoveryUnsupportedError:
                return None
            self._evaluation_stack.callback(recovery.close)
            self._evaluation_stack.callback(self.close)
            memory = self._evaluation_stack.enter_context(enforced_memory_limit(trainer, models))
        kind = SampleKind[int](length_of=lambda row: self._samples[row].length, filler=lambda row: row)
        limit = RowLimit(max(len(batch.samples), trainer.args.eval_batch_size))
        options: dict[str, Any] = {"limit": limit, "recovery": recovery, "on_attempt": self._begin_attempt}
        self._runner = StepRunner(model, self._forward, kind=kind, stage=EVALUATION, **options)
        self._runner.trains = False
        self._runner.measure_memory(memory)
        if self._limit is not None:
            self._runner.load_state_dict(self._limit)
        return self._runner

    def _forward(self, rows: Sequence[int]) -> Totals:
        """Run `prediction_step` on some rows of the batch. Outputs of a part of the batch are moved to the host."""
        is_piece = len(rows) < len(self._samples)
        # a copy, because compute_loss may edit its inputs
        inputs = self._inputs_of(rows) if is_piece else recursively_apply(Tensor.clone, self._inputs)
        counts = counts_of(inputs, len(rows)) if is_piece else Counts(len(rows))
        isolated = only_fsdp_communicates(self.trainer, self._model)
        metrics = self._metrics.of_microbatch(0, len(rows), inputs)
        with isolated, metrics, override_attributes(self.trainer, _get_num_items_in_batch=lambda *_: self._items):
            loss, logits, labels = self._prediction_step(inputs)
        if is_piece:
            logits, labels = recursively_apply(Tensor.cpu, (logits, labels))
        self._pieces.append(Piece(BatchLoss(loss, counts), (logits, labels)))
        return Totals(torch.zeros(()), 0)

    def _inputs_of(self, rows: Sequence[int]) -> Any:
        """Return the inputs of some rows. Collate samples again for nested inputs, several rows per sample (DPO), and
        images, of which a sample may have any number."""
        tensors = {name: each for name, each in self._inputs.items() if isinstance(each, Tensor) and each.dim()}
        nested = any(isinstance(each, Mapping | list | tuple) for each in self._inputs.values())
        if nested or media_in(self._inputs) or any(len(tensor) != len(self._samples) for tensor in tensors.values()):
            return CollatedBatch.of([self._samples[row] for row in rows], self._collate).inputs
        # Collate one sample alone: a tensor whose length stays the same, such as class weights, is not sliced.
        restore, one = remember_random_state(self.trainer), CollatedBatch.of(self._samples[:1], self._collate).inputs
        restore()
        sliced = (name for name in tensors if getattr(one.get(name), "shape", ())[:1] != tensors[name].shape[:1])
        return {**self._inputs, **{name: tensors[name][list(rows)] for name in sliced}}

    def _preprocess_piece(self, piece: Piece) -> Piece:
        """Collective: as Trainer does, pad outputs to the longest of all ranks, and preprocess the logits."""
        if self._preprocess is None or piece.outputs[0] is None:
            return piece
        pad = partial(self.trainer.accelerator.pad_across_processes, dim=1, pad_index=-100)
        padded = (
            None if each is None else pad(each) for each in send_to_device(piece.outputs, self.trainer.args.device)
        )
        return piece._replace(outputs=(self._preprocess(*padded), piece.outputs[1]))

    def _concatenate(self, pieces: Sequence[Piece], index: int) -> Any:
        """Return the logits (index 0) or labels (index 1) of the whole batch, on the device."""
        for piece in pieces:
            for tensor in tree_leaves(piece.outputs[index]):
                if isinstance(tensor, Tensor) and tensor.shape[:1] != (piece.loss.counts.rows,):
                    raise ConfigError(
                        f"{CANNOT_SPLIT}: an output of shape {tuple(tensor.shape)} does not have a row for each of "
                        f"{piece.loss.counts.rows} samples; set prediction_loss_only=True, or {REMEDY}"
                    )
        whole, *others = (piece.outputs[index] for piece in pieces)
        for other in others if whole is not None else ():
            whole = nested_concat(whole, other, padding_index=-100)
        return send_to_device(whole, self.trainer.args.device)

    def _loss(self, pieces: Sequence[BatchLoss]) -> Any:
        """Collective: compute the loss of the batch from the losses of its pieces."""
        if pieces[0].loss is None:
            return None
        reduction = self._reduction = self._reduction or self._find_reduction()
        whole = Counts.total(piece.counts for piece in pieces)
        weights = [reduction.weight(piece.counts, whole) for piece in pieces]
        # The mean loss of a piece without labels is NaN, even times 0, so leave it out.
        return sum(piece.loss * weight for piece, weight in zip(pieces, weights, strict=True) if weight)

    def _find_reduction(self) -> Reduction:
        """Collective: find out how losses add up, from rows of the batch."""
        found = find_reduction(self._compare, self.trainer, self._model, thorough=True)
        if found.reason == CHECK_FAILED:
            raise RecoveryUnsupportedError(f"{CANNOT_SPLIT}: two rows must fit (to compare losses); {REMEDY}")
        if found.reduction is None:
            raise ConfigError(f"{CANNOT_SPLIT}: {found.reason}; {REMEDY}")
        return found.reduction

    def _compare(self, look: Look) -> list[TwoSamples] | None:
        """Collective: return the losses of two rows or groups of rows with different numbers of labels, on all ranks;
        None if a rank runs out of memory."""
        counts = [counts_of(self._inputs_of([row]), 1) for row in range(len(self._samples))]
        rows = sorted(range(len(counts)), key=lambda row: (not counts[row].next_tokens, counts[row]))
        assert self._runner is not None
        few, many = rows[:1], rows[-1:]
        if look.rows > 2:
            used = rows[: max(2, min(look.rows, self._runner.limit.size))]
            few, many = used[: len(used) // 2], used[len(used) // 2 :]
        pieces, self._pieces = self._pieces, []
        try:
            with noise_in(self._model, look):
                groups = [many, few, [*few, *many]]
                return losses_of_groups(self._runner, groups, lambda: [each.loss for each in self._pieces])
        finally:
            self._pieces = pieces
