"""The two stages of a step of preference training (DPO), which run one after the other on the same pairs.

    reference    forward pass over all pairs of the step; stores the log-probabilities in the pairs
    policy       forward pass, loss with these log-probabilities, and backward pass

So activations of reference and policy are never in memory together, and each stage has its own limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torchtune.modules.peft import disable_adapter
from torchtune.training import get_act_offloading_ctx_manager

from torchtune_adaptive.checkpoints.manager import load_reference
from torchtune_adaptive.checkpoints.store import State
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.contexts import evaluating
from torchtune_adaptive.data.loading import Data
from torchtune_adaptive.data.samples import FILLER, REFERENCE_LOG_PROBS, Sample
from torchtune_adaptive.data.unpadded import allowing_long_rows, batch_to_device
from torchtune_adaptive.engine.results import StepResult, Totals
from torchtune_adaptive.lifecycle.distributed import Devices
from torchtune_adaptive.models.model import build_frozen_model, build_model, disable_dropout
from torchtune_adaptive.objectives.finetuning import clearing_offloaded_on_error
from torchtune_adaptive.objectives.stages import StagePasses
from torchtune_adaptive.objectives.validation import COUNT, VALIDATION_STAGE

REFERENCE = "reference log-probabilities"
POLICY = "policy"
"""The names of the stages."""

VALIDATION_REFERENCE_STAGE = f"{VALIDATION_STAGE}, {REFERENCE}"

PAIRS = "pairs"
ACCURACY = "rewards/accuracies"
ANSWERS = ("chosen", "rejected")


class Scores(NamedTuple):
    """Log-probabilities and logits of a microbatch of pairs."""

    log_probs: Tensor
    """[2, pairs]: sums over the labels of the chosen answers, and of the rejected ones."""
    logits: Tensor
    row_lengths: list[int]
    """Numbers of tokens of the chosen answers, followed by those of the rejected ones."""
    target_tokens: int


def score(model: nn.Module, pairs: Sequence[Sample], data: Data, device: torch.device) -> Scores:
    """Run the model on pairs. The scores of a pair do not depend on the other pairs of the microbatch."""
    rows, ignored = data.kind.rows_of(pairs), data.kind.ignored_label
    lengths = [len(row["tokens"]) for row in rows]
    batch = data.collate(rows)
    # Shift: each position predicts the next token.
    labels = pad(batch.pop("labels")[..., 1:], (0, 1), value=ignored)
    target_tokens = int(labels.ne(ignored).sum())
    labels = labels.to(device)
    batch_to_device(batch, device)
    with allowing_long_rows(model, batch):
        logits: Tensor = model(**batch)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction="none")
    log_probs = -sums_of_rows(losses.view(labels.shape), lengths)
    return Scores(log_probs.view(2, -1), logits, lengths, target_tokens)


def sums_of_rows(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over each row. If all rows are concatenated in one, split it into rows of these `lengths`."""
    if values.size(0) == len(lengths):
        return values.sum(-1)
    # `index_add` is not deterministic on a GPU, and `segment_reduce` is less accurate with 4096 values.
    return torch.stack([part.sum() for part in values[0].split(list(lengths))])


@torch.no_grad()
def _sums_over_pairs(scores: Scores, rewards: Sequence[Tensor], counted: Tensor) -> dict[str, Tensor]:
    sums = {PAIRS: counted.sum(), ACCURACY: ((rewards[0] > rewards[1]) * counted).sum()}
    means, tokens = scores.logits.mean(-1), scores.logits.new_tensor(scores.row_lengths)
    if means.size(0) == len(tokens):  # ignore padding
        means = means * (torch.arange(means.size(1), device=means.device) < tokens[:, None])
    logits = sums_of_rows(means, scores.row_lengths).chunk(2)
    for at, answer in enumerate(ANSWERS):
        sums[f"rewards/{answer}"] = (rewards[at] * counted).sum()
        sums[f"log_probs/{answer}"] = (scores.log_probs[at] * counted).sum()
        sums[f"logits/{answer}"] = (logits[at] * counted).sum()
        sums[f"tokens/{answer}"] = (tokens.chunk(2)[at] * counted).sum()
    return sums


@dataclass(frozen=True)
class Passes:
    """The passes of both stages over a microbatch of pairs.

    With LoRA, `policy` and `reference` are the same model, and the reference pass disables its adapters.
    """

    policy: nn.Module
    reference: nn.Module
    loss_fn: nn.Module
    data: Data
    settings: Settings
    device: torch.device

    @cached_property
    def _activations(self) -> AbstractContextManager[object]:
        context = get_act_offloading_ctx_manager(self.policy, self.settings.enable_activation_offloading)
        return cast(AbstractContextManager[object], context)

    @property
    def on_training_data(self) -> StagePasses:
        """The passes of both stages of a step."""
        return {REFERENCE: (self.reference, self.score_reference), POLICY: (self.policy, self.train)}

    def on_validation_data(self, data: Data) -> StagePasses:
        """Return the passes of both stages of a validation."""
        own = replace(self, data=data, settings=replace(self.settings, enable_activation_offloading=False))
        reference = own.reference, own.score_reference
        return {VALIDATION_REFERENCE_STAGE: reference, VALIDATION_STAGE: (own.policy, own.evaluate)}

    @torch.no_grad()
    def score_reference(self, pairs: Sequence[Sample]) -> Totals:
        """Store the log-probabilities of the reference in the pairs."""
        with ExitStack() as stack:
            if self.reference is self.policy:
                stack.enter_context(evaluating(self.policy))  # without dropout
                stack.enter_context(disable_adapter(self.policy))
            scores = score(self.reference, pairs, self.data, self.device)
        for pair, log_probs in zip(pairs, scores.log_probs.unbind(1), strict=True):
            pair[REFERENCE_LOG_PROBS] = log_probs
        return Totals(scores.log_probs.new_zeros(()), scores.target_tokens)

    def train(self, pairs: Sequence[Sample]) -> Totals:
        """Accumulate the gradients of the policy, with a loss that is summed over pairs."""
        with clearing_offloaded_on_error(self._activations):
            loss, target_tokens, sums = self._loss(pairs)
            loss.backward()
        return Totals(loss.detach(), target_tokens, sums)

    @torch.no_grad()
    def evaluate(self, pairs: Sequence[Sample]) -> Totals:
        """Return the loss, summed over pairs, and the number of pairs whose chosen answer has the higher reward."""
        loss, target_tokens, sums = self._loss(pairs)
        return Totals(loss, target_tokens, {COUNT: sums[PAIRS], f"val_{ACCURACY}": sums[ACCURACY]})

    def _loss(self, pairs: Sequence[Sample]) -> tuple[Tensor, int, dict[str, Tensor]]:
        reference = torch.stack([pair[REFERENCE_LOG_PROBS] for pair in pairs], dim=1).to(self.device)
        counted = torch.tensor([FILLER not in pair for pair in pairs], device=self.device).float()
        with self._activations:
            scores = score(self.policy, pairs, self.data, self.device)
        losses, *rewards = self.loss_fn(*scores.log_probs, *reference)
        sums = _sums_over_pairs(scores, rewards, counted)
        # `counted` is 0 for fillers, whose loss would be ln 2.
        return (losses * counted).sum(), scores.target_tokens, sums


def build_dpo_models(
    settings: Settings, devices: Devices, checkpoint: State, *, with_adapters: bool
) -> tuple[nn.Module, nn.Module]:
    """Collective: build the policy and the reference. With adapters, both are the same model."""
    policy = build_model(settings, devices, checkpoint, with_adapters=with_adapters)
    if with_adapters:
        return policy, policy
    disable_dropout(policy)
    return policy, build_frozen_model(settings, devices, load_reference(settings))


def figures_of(results: Mapping[str, StepResult]) -> dict[str, float]:
    """Return torchtune's DPO metrics, which are means over pairs or tokens. Waits for the GPU."""
    sums = {name: float(value) for name, value in results[POLICY].sums.items()}
    names = [ACCURACY, *(f"{what}/{answer}" for what in ("rewards", "log_probs") for answer in ANSWERS)]
    figures = {name: sums[name] / max(1.0, sums[PAIRS]) for name in names}
    figures["rewards/margins"] = figures["rewards/chosen"] - figures["rewards/rejected"]
    for answer in ANSWERS:
        figures[f"logits/{answer}"] = sums[f"logits/{answer}"] / max(1.0, sums[f"tokens/{answer}"])
    return {
        **figures,
        "reference_microbatches": results[REFERENCE].microbatches,
        "reference_microbatch_rows": results[REFERENCE].load.most_rows,
    }
