"""The two stages of a preference step, over the same pairs.

    reference    forward pass over all pairs of the step, which store their log-probabilities
    policy       forward pass, loss compared with the reference, backward pass

So activations of reference and policy are never in memory together, and each stage has its own limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torchtune.modules.peft import disable_adapter
from torchtune.training import get_act_offloading_ctx_manager

from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.results import StepResult, Totals
from torchtune_adaptive.engine.step import Stages, StepRunner
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import shown
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.finetuning import OnChange, build_recovery, clearing_offloaded_on_error, plan_padding
from torchtune_adaptive.tune.samples import FILLER, Sample
from torchtune_adaptive.tune.unpadded import allowing_long_rows, batch_to_device

REFERENCE = "reference log-probabilities"
POLICY = "policy"
"""The names of the stages."""

KEPT = "reference_log_probs"
"""Key for the reference log-probabilities of a pair: chosen, rejected."""

PAIRS = "pairs"
ANSWERS = ("chosen", "rejected")


class Scores(NamedTuple):
    """Log-probabilities and logits of a microbatch of pairs."""

    log_probs: Tensor
    """[2, pairs]: sums over the labels of chosen and rejected answers."""
    logits: Tensor
    row_lengths: list[int]
    """Tokens of the chosen, then of the rejected answers."""
    target_tokens: int


def score(model: nn.Module, pairs: Sequence[Sample], data: Data, device: torch.device) -> Scores:
    """Score pairs; results do not depend on the split into microbatches."""
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
    of_token = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction="none")
    log_probs = -sums_of_rows(of_token.view(labels.shape), lengths)
    return Scores(log_probs.view(2, -1), logits, lengths, target_tokens)


def sums_of_rows(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over each row; `lengths` separates the rows if they are concatenated."""
    if values.size(0) == len(lengths):
        return values.sum(-1)
    sums: Tensor = _SumsOfParts.apply(values[0], list(lengths))
    return sums


class _SumsOfParts(torch.autograd.Function):
    """Sums over parts of one row.

    `index_add` is not deterministic on a GPU. `segment_reduce` adds sequentially, which loses a digit at 4096 values.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, lengths: list[int]) -> Tensor:
        ctx.lengths = lengths
        sums = row.new_empty(len(lengths))
        for part, total in zip(row.split(lengths), sums, strict=True):
            torch.sum(part, dim=0, out=total)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        of_parts = zip(gradient, ctx.lengths, strict=True)
        return torch.cat([of_part.expand(length) for of_part, length in of_parts]), None


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters and dropout of a LoRA model."""
    training = model.training
    model.eval()
    try:
        with disable_adapter(model):
            yield
    finally:
        model.train(training)


@torch.no_grad()
def _sums_over_pairs(scores: Scores, rewards: Sequence[Tensor], counted: Tensor) -> dict[str, Tensor]:
    sums = {PAIRS: counted.sum(), "rewards/accuracies": ((rewards[0] > rewards[1]) * counted).sum()}
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


def build_stages(
    policy: nn.Module,
    reference: nn.Module,
    loss_fn: nn.Module,
    data: Data,
    settings: Settings,
    device: torch.device,
    on_change: OnChange,
) -> Stages[Sample]:
    """Collective: build both stages, with an initial limit of `batch_size` pairs.

    If policy and reference are the same model, the reference stage disables its adapters.
    """
    plan_padding(data, policy, settings, device)
    as_reference = partial(without_adapters, policy) if reference is policy else nullcontext
    activations = get_act_offloading_ctx_manager(policy, settings.enable_activation_offloading)

    def refer(pairs: Sequence[Sample]) -> Totals:
        with torch.no_grad(), as_reference():
            scores = score(reference, pairs, data, device)
        for pair, log_probs in zip(pairs, scores.log_probs.unbind(1), strict=True):
            pair[KEPT] = log_probs
        return Totals(scores.log_probs.new_zeros(()), scores.target_tokens)

    def train(pairs: Sequence[Sample]) -> Totals:
        """Accumulate the gradients of the policy, summed over pairs."""
        asked = torch.stack([pair[KEPT] for pair in pairs], dim=1).to(device)
        counted = torch.tensor([FILLER not in pair for pair in pairs], device=device).float()
        with clearing_offloaded_on_error(activations):
            with activations:
                scores = score(policy, pairs, data, device)
            losses, *rewards = loss_fn(*scores.log_probs, *asked)
            sums = _sums_over_pairs(scores, rewards, counted)
            target_tokens = scores.target_tokens
            del scores  # free the logits before the backward
            loss = (losses * counted).sum()  # a filler has loss ln 2 but must not count
            loss.backward()
        return Totals(loss.detach(), target_tokens, sums)

    recovery = build_recovery(settings, on_change, *dict.fromkeys((policy, reference)))

    def runner_of(model: nn.Module, run: Callable[[Sequence[Sample]], Totals], stage: str) -> StepRunner[Sample]:
        kind, limit = data.kind.for_steps(model), RowLimit(settings.batch_size)
        return StepRunner(model, run, kind=kind, limit=limit, recovery=recovery, stage=stage)

    return Stages({REFERENCE: runner_of(reference, refer, REFERENCE), POLICY: runner_of(policy, train, POLICY)})


def build_preference_loss(cfg: DictConfig) -> nn.Module:
    """Build the loss and try it on two pairs."""
    loss_fn: nn.Module = components.build("loss", cfg)
    log_probs = torch.zeros(2)
    try:
        result = loss_fn(log_probs, log_probs, log_probs, log_probs)
        fits = len(result) == 3 and all(each.shape == log_probs.shape for each in result)
    except Exception as error:  # noqa: BLE001 - a loss of another kind can fail in any way
        fits, result = False, components.in_a_line(error)
    if not fits:
        given = ", ".join(f"{key}: {value!r}" for key, value in cfg.loss.items() if key != COMPONENT)
        raise ConfigError(
            f"loss is {cfg.loss.get(COMPONENT)}{given and f' with {given}'}, which does not compute a loss and two "
            f"rewards per pair from log-probabilities of policy and reference ({shown(result)}): use one such as "
            "torchtune.rlhf.loss.DPOLoss"
        )
    return loss_fn


def figures_of(results: Mapping[str, StepResult]) -> dict[str, float]:
    """Return torchtune's metrics of the answers, means over pairs or tokens. Synchronizes with the GPU."""
    sums = {name: float(value) for name, value in results[POLICY].sums.items()}
    names = ["rewards/accuracies", *(f"{what}/{answer}" for what in ("rewards", "log_probs") for answer in ANSWERS)]
    figures = {name: sums[name] / max(1.0, sums[PAIRS]) for name in names}
    figures["rewards/margins"] = figures["rewards/chosen"] - figures["rewards/rejected"]
    for answer in ANSWERS:
        figures[f"logits/{answer}"] = sums[f"logits/{answer}"] / max(1.0, sums[f"tokens/{answer}"])
    return {
        **figures,
        "reference_microbatches": results[REFERENCE].microbatches,
        "reference_microbatch_rows": results[REFERENCE].load.most_rows,
    }
