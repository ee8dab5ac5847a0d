"""One microbatch through a torchtune model: collate, forward, loss, backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torchtune import training
from torchtune.training import OffloadActivations

from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.engine.governor import Change
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.ranks import sum_over_ranks
from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.engine.step import Recovery, StepRunner
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.this_run import THIS_RUN
from torchtune_adaptive.tune.culprits import check_length, longest_taken
from torchtune_adaptive.tune.data import Batching, Data
from torchtune_adaptive.tune.loss import Logits, scoring_only, zero_of
from torchtune_adaptive.tune.offloading import leaving_nothing_offloaded
from torchtune_adaptive.tune.process_group import Place
from torchtune_adaptive.tune.samples import Sample
from torchtune_adaptive.tune.unpadded.documents import (
    Batch,
    batch_to_device,
    joined,
    longest_of,
    taking_long_rows,
    targets_of,
)
from torchtune_adaptive.tune.unpadded.support import is_padded

logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """A microbatch as a model takes it."""

    batch: Batch
    labels: Tensor
    """The token that follows each position; without padding, of targets only."""
    targets: Tensor | None
    """Positions that need logits; None for all."""
    target_tokens: int
    learns: bool
    """Whether any label counts."""


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """Adds the gradients of a microbatch, summed over its target tokens, to the model's."""

    model: nn.Module
    loss_fn: nn.Module
    batching: Batching
    device: torch.device
    activations: AbstractContextManager[object]
    weighs_every_split_alike: bool = False
    """Counts the labels that are left after the shift, so that a step's gradient does not depend on its microbatches.
    torchtune counts them before: the same, but for samples whose first token is a label."""
    loss_scale: Callable[[int], float] | None = None
    """Factor of the loss by this rank's target tokens, for an optimizer that steps inside the backward."""

    def __call__(self, samples: Sequence[Sample]) -> Totals:
        return self.run(self.prepare(samples))

    def prepare(self, samples: Sequence[Sample]) -> Prepared:
        """A batch of these samples, on the host."""
        ignored = self.batching.kind.ignored_label
        batch = self.batching.batch_of(samples)
        check_length(self.model, longest_of(batch))
        tokens_as_torchtune_counts = int(batch["labels"].ne(ignored).sum())
        # the token at a position is the label of the position before it
        labels = pad(batch.pop("labels")[..., 1:], (0, 1), value=ignored)
        learned_tokens = int(labels.ne(ignored).sum())
        target_tokens = learned_tokens if self.weighs_every_split_alike else tokens_as_torchtune_counts
        targets = targets_of(batch, labels, ignored)
        scored = labels if targets is None else labels[:, targets]
        return Prepared(batch, scored, targets, target_tokens, learned_tokens > 0)

    def run(self, prepared: Prepared) -> Totals:
        """Forward and backward."""
        batch, labels, targets, target_tokens, learns = prepared
        batch_to_device(batch, self.device)
        chosen = None if targets is None else partial(torch.index_select, dim=1, index=targets.to(self.device))
        with self.activations, taking_long_rows(self.model, batch), scoring_only(self.model, chosen):
            logits = self.model(**batch)
        loss = self._loss(logits, labels.to(self.device)) * target_tokens if learns else zero_of(logits)
        del logits  # or they would live through the backward
        total = loss.detach()
        if self.loss_scale is not None:
            loss = loss * self.loss_scale(target_tokens)
        loss.backward()
        return Totals(loss_sum=total, target_tokens=target_tokens)

    def _loss(self, logits: Logits, labels: Tensor) -> Tensor:
        """The mean over target tokens. Losses that take logits in chunks shape them themselves."""
        if isinstance(logits, Tensor):
            logits, labels = logits.reshape(-1, logits.size(-1)), labels.reshape(-1)
        loss: Tensor = self.loss_fn(logits, labels)
        return loss


def build_forward_backward(
    model: nn.Module,
    loss_fn: nn.Module,
    batching: Batching,
    settings: Settings,
    device: torch.device,
) -> Callable[[Sequence[Sample]], Totals]:
    """What runs a microbatch of finetuning."""
    activations = training.get_act_offloading_ctx_manager(model, settings.enable_activation_offloading)
    forward_backward = ForwardBackward(
        model=model,
        loss_fn=loss_fn,
        batching=batching,
        device=device,
        activations=activations,
        weighs_every_split_alike=settings.adaptive.token_budget is not None,
        loss_scale=partial(_mean_over_ranks, device) if settings.optimizer_in_bwd else None,
    )
    if isinstance(activations, OffloadActivations):
        return leaving_nothing_offloaded(forward_backward, activations)
    return forward_backward


def build_step_runner(
    model: nn.Module,
    loss_fn: nn.Module,
    data: Data,
    settings: Settings,
    place: Place,
    on_change: Callable[[Change], object],
) -> StepRunner[Sample]:
    """Collective: what runs a step, in microbatches of `batch_size` rows to begin with."""
    batching = batching_of(data, model, settings, place.device)
    forward_backward = build_forward_backward(model, loss_fn, batching, settings, place.device)
    return StepRunner(
        model,
        forward_backward,
        kind=batching.kind.for_steps(model),
        limit=RowLimit(settings.batch_size),
        recovery=build_recovery(settings, on_change, model),
    )


def batching_of(data: Data, model: nn.Module, settings: Settings, device: torch.device) -> Batching:
    """Collective: how this run makes microbatches of the data, padded or not."""
    check_sequence_length(model, settings.adaptive)
    kind = replace(data.kind, padded=is_padded(model, settings, device, packed=data.packed, run_model=True))
    return Batching(kind, data.collate if kind.padded else partial(joined, ignored=kind.ignored_label))


def build_recovery(settings: Settings, on_change: Callable[[Change], object], *models: nn.Module) -> Recovery:
    """Collective: what the stages of a step share, as the config says."""
    return Recovery(
        *models,
        enabled=recovers(settings),
        regrow_after=settings.adaptive.regrow_after,
        asked_to_stop=THIS_RUN.asked_to_stop,
        on_change=on_change,
    )


def check_sequence_length(model: nn.Module, adaptive: AdaptiveConfig) -> None:
    """Refuses a length that the model cannot take, before a sample of it is made whose error would blame the data."""
    wanted, allowed = adaptive.sequence_length, longest_taken([model])
    if wanted is not None and allowed is not None and wanted > allowed:
        raise ConfigError(
            f"adaptive.sequence_length is {wanted}, but the model takes at most {allowed} (its max_seq_len): "
            f"set it to {allowed} or less, or to null"
        )


def _mean_over_ranks(device: torch.device, target_tokens: int) -> float:
    """Collective: the factor that makes a sum over this rank's tokens FSDP's share of the mean over all tokens."""
    # Where there is none, the loss is zero, and so is its gradient.
    return dist.get_world_size() / max(1, int(sum_over_ranks(torch.tensor(target_tokens, device=device))))


def recovers(settings: Settings) -> bool:
    reason = obstacle_to_recovery(settings)
    if reason is None:
        return settings.adaptive.recover_from_oom is not False
    if dist.get_rank() == 0:
        logger.info("recovery from out-of-memory errors is off: %s", reason)
    return False


def obstacle_to_recovery(settings: Settings) -> str | None:
    """Why a step cannot be run again: weights change before it ends, or its peers would wait for activations."""
    reason = None
    if settings.optimizer_in_bwd:
        reason = "optimizer_in_bwd is True, which updates weights inside the backward"
    elif settings.tensor_parallel_dim > 1:
        reason = f"tensor_parallel_dim is {settings.tensor_parallel_dim}, and its collectives carry activations"
    if reason is not None and settings.adaptive.recover_from_oom:
        raise ConfigError(f"adaptive.recover_from_oom is True, but {reason}: a step cannot be repeated; set it to null")
    return reason
