"""Finetuning: the configured loss, and the forward and backward pass of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torchtune import training
from torchtune.training import OffloadActivations

from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data.loading import Data
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.data.unpadded import allowing_long_rows, batch_to_device, targets_of
from torchtune_adaptive.engine.fsdp import FSDPModule
from torchtune_adaptive.engine.ranks import sum_over_ranks
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.objectives.stages import StagePasses
from torchtune_adaptive.objectives.validation import VALIDATION_STAGE


def build_loss(settings: Settings, model: nn.Module) -> Any:
    """Build the loss; if it takes logits in chunks, set the model to return chunks."""
    loss_fn = components.build("loss", settings.config)
    if settings.compile:
        training.compile_loss(loss_fn, verbose=False)
    if hasattr(loss_fn, "num_output_chunks"):
        cast(Any, model).set_num_output_chunks(loss_fn.num_output_chunks)
    return loss_fn


class ForwardBackward:
    """Runs forward and backward of a microbatch, with a loss that is summed over its target tokens."""

    def __init__(
        self, model: nn.Module, loss_fn: nn.Module, data: Data, settings: Settings, device: torch.device
    ) -> None:
        self.model, self.loss_fn, self.data, self.settings, self.device = model, loss_fn, data, settings, device
        self.activations = training.get_act_offloading_ctx_manager(model, settings.enable_activation_offloading)
        self._decoder = getattr(model, "decoder", model)
        # A head in its own FSDP group is gathered once per chunk. A batch with few tokens would have fewer chunks, and
        # peers would wait for the missing all-gathers. So every batch has the same number of chunks.
        has_own_group = isinstance(getattr(self._decoder, "output", None), FSDPModule)
        self._chunks: int = getattr(loss_fn, "num_output_chunks", 1) if has_own_group else 1

    def __call__(self, samples: Sequence[Sample]) -> Totals:
        """Accumulate the gradients of one microbatch."""
        with clearing_offloaded_on_error(self.activations):
            loss, labels, shifted_labels = self._loss(samples)
            target_tokens = labels if self.settings.adaptive.token_budget is None else shifted_labels
            loss = loss * target_tokens
            total = loss.detach()
            if self.settings.optimizer_in_bwd:  # the optimizer runs inside the backward, so scale now
                # FSDP averages over ranks: scale this rank's sum so that the result is the mean over all tokens.
                tokens_of_all = sum_over_ranks(torch.tensor(target_tokens, device=self.device))
                loss = loss * (dist.get_world_size() / max(1, int(tokens_of_all)))
            loss.backward()
        return Totals(loss_sum=total, target_tokens=target_tokens)

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> Totals:
        """Return the loss of one microbatch, summed over target tokens; it does not depend on the split of the step."""
        loss, _, shifted_labels = self._loss(samples)
        return Totals(loss * shifted_labels, shifted_labels)

    def on_validation_data(self, data: Data) -> StagePasses:
        """Return the passes of a validation."""
        settings = replace(self.settings, enable_activation_offloading=False)
        own = ForwardBackward(self.model, self.loss_fn, data, settings, self.device)
        return {VALIDATION_STAGE: (self.model, own.evaluate)}

    def _loss(self, samples: Sequence[Sample]) -> tuple[Tensor, int, int]:
        """Return the mean loss, and the numbers of labels before and after the shift by one token.

        torchtune's recipe divides by the number before the shift, which includes a label at the first token. Without
        padding, that number would depend on the split into microbatches.
        """
        kind, ignored = self.data.kind, self.data.kind.ignored_label
        batch = self.data.collate(kind.rows_of(samples))
        unshifted_labels = int(batch["labels"].ne(ignored).sum())
        # Shift: each position predicts the next token.
        labels = pad(batch.pop("labels")[..., 1:], (0, 1), value=ignored)
        shifted_labels = int(labels.ne(ignored).sum())
        if (targets := targets_of(batch, labels, ignored)) is not None:
            labels, targets = labels[:, targets], targets.to(self.device)
        if missing := -labels.size(1) % self._chunks:
            labels = pad(labels, (0, missing), value=ignored)
        select = partial(_selected, targets=targets, missing=missing) if targets is not None or missing else None
        batch_to_device(batch, self.device)
        with self.activations, allowing_long_rows(self.model, batch), logits_only_for(self._decoder, select):
            logits = self.model(**batch)
        if not shifted_labels:
            # The mean over zero tokens is NaN, but peers wait for the backward, so run one with a loss of zero.
            chunks = [logits] if isinstance(logits, Tensor) else logits
            loss = torch.stack([chunk.sum() for chunk in chunks]).sum() * 0.0
        elif isinstance(logits, Tensor):
            loss = self.loss_fn(logits.reshape(-1, logits.size(-1)), labels.reshape(-1).to(self.device))
        else:  # losses that take chunks reshape them
            loss = self.loss_fn(logits, labels.to(self.device))
        return loss, unshifted_labels, shifted_labels


def _selected(states: Tensor, *, targets: Tensor | None, missing: int) -> Tensor:
    """Select the states at `targets`, and append `missing` zeros, so that the chunks have equal sizes."""
    states = states if targets is None else states.index_select(1, targets)
    return pad(states, (0, 0, 0, missing)) if missing else states


@contextmanager
def logits_only_for(model: nn.Module, select: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """Compute logits only for the hidden states that `select` returns, because logits may be the largest tensors."""
    if select is None:
        yield
        return
    norm = cast(nn.Module, model.norm)
    handle = norm.register_forward_pre_hook(lambda _, states: (select(states[0]),))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def clearing_offloaded_on_error(activations: AbstractContextManager[object]) -> Iterator[None]:
    """If the pass fails, clear the tensors that torchtune's activation offloading keeps for the backward."""
    try:
        yield
    except BaseException:
        if isinstance(activations, OffloadActivations):
            for stash in ("tracker", "fwd_stash", "bwd_tensor_stash", "bwd_ev_stash"):
                getattr(activations, stash, {}).clear()
            activations.is_first_forward_call = True
            activations.is_first_backward_call = True
            if activations.use_streams:
                activations.curr_graph_id = None
                activations.curr_autograd_node = None
        raise
