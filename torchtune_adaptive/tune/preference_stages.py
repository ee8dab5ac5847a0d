"""The two stages of a preference step, over the same pairs: the reference's log-probabilities, then training.

    reference    forward only, all pairs of the step; each pair keeps what was found for it
    policy       forward, loss of each pair beside its reference, backward

So the reference's activations never lie beside the policy's, and each stage has a limit of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torchtune.modules.peft import disable_adapter
from torchtune.training import OffloadActivations, get_act_offloading_ctx_manager

from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.governor import Change
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.engine.step import Recovery, Stages, StepRunner
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import shown
from torchtune_adaptive.tune.culprits import check_length
from torchtune_adaptive.tune.data import Batching, Data
from torchtune_adaptive.tune.microbatch import batching_of, build_recovery
from torchtune_adaptive.tune.offloading import leaving_nothing_offloaded
from torchtune_adaptive.tune.samples import Kind, Sample
from torchtune_adaptive.tune.unpadded.documents import batch_to_device, longest_of, taking_long_rows

REFERENCE = "reference log-probabilities"
POLICY = "policy"
"""The names of the stages."""

KEPT = "reference_log_probs"
"""The key under which a pair keeps what the reference has found for it: two numbers, chosen and rejected."""

PAIRS = "pairs"
ANSWERS = ("chosen", "rejected")
EMPTY, IDENTICAL = "pairs/empty", "pairs/identical"
"""Sums: pairs with an answer that has no label, and pairs whose answers are the same."""

PairPass = Callable[[Sequence[Sample]], Totals]
"""One microbatch of a stage."""


class Scores(NamedTuple):
    """What a model says of the answers of some pairs; everything else that is kept lives as long as this does."""

    log_probs: Tensor
    """[2, pairs]: summed over the labels of the chosen and of the rejected answers."""
    logits: Tensor
    row_lengths: list[int]
    """Tokens of the chosen answers, then of the rejected ones."""
    target_tokens: int


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Log-probabilities of the answers of pairs, whichever pairs share a microbatch."""

    batching: Batching
    device: torch.device

    def __call__(self, model: nn.Module, pairs: Sequence[Sample]) -> Scores:
        kind, collate = self.batching
        rows, ignored = kind.rows_of(pairs), kind.ignored_label
        lengths = [len(row["tokens"]) for row in rows]
        batch = collate(rows)
        check_length(model, longest_of(batch))
        # the token at a position is the label of the position before it
        labels = pad(batch.pop("labels")[..., 1:], (0, 1), value=ignored)
        target_tokens = int(labels.ne(ignored).sum())
        labels = labels.to(self.device)
        batch_to_device(batch, self.device)
        with taking_long_rows(model, batch):
            logits: Tensor = model(**batch)
        of_token = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction="none")
        log_probs = -sums_of_rows(of_token.view(labels.shape), lengths)
        return Scores(log_probs.view(2, -1), logits, lengths, target_tokens)


def sums_of_rows(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """The sum over each row or, where rows are one after another, over each of them."""
    if values.size(0) == len(lengths):
        return values.sum(-1)
    sums: Tensor = _SumsOfParts.apply(values[0], list(lengths))
    return sums


class _SumsOfParts(torch.autograd.Function):
    """The sum over each of the parts of one row; not by `index_add`, which adds up in another order each time on a GPU,
    nor by `segment_reduce`, which adds one number after another: of 4096 it loses a digit that `sum` keeps.

    It takes one block of memory, however many parts there are.
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


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """Forward only: each pair keeps the reference's log-probabilities. Run again, it writes the same once more."""

    model: nn.Module
    score: Scorer
    as_reference: Callable[[], AbstractContextManager[object]]
    """Opened around the forward: what makes a reference of the model, where it is the policy itself."""

    def __call__(self, pairs: Sequence[Sample]) -> Totals:
        with torch.no_grad(), self.as_reference():
            scores = self.score(self.model, pairs)
        for pair, kept in zip(pairs, scores.log_probs.unbind(1), strict=True):
            pair[KEPT] = kept
        return Totals(scores.log_probs.new_zeros(()), scores.target_tokens)


@dataclass(frozen=True, kw_only=True)
class PolicyPass:
    """Adds the gradients of pairs, summed over them, to the policy's."""

    model: nn.Module
    loss_fn: nn.Module
    score: Scorer
    activations: AbstractContextManager[object]

    def __call__(self, pairs: Sequence[Sample]) -> Totals:
        reference = torch.stack([pair[KEPT] for pair in pairs], dim=1).to(self.score.device)
        kind = self.score.batching.kind
        counted = torch.tensor([kind.counts(pair) for pair in pairs], device=self.score.device).float()
        with self.activations:
            scores = self.score(self.model, pairs)
        losses, *rewards = self.loss_fn(*scores.log_probs, *reference)
        sums = _sums_over_pairs(scores, rewards, counted)
        sums |= {name: counted.new_tensor(count) for name, count in _flaws(kind, pairs).items()}
        target_tokens = scores.target_tokens
        del scores  # or the logits would live through the backward
        loss = (losses * counted).sum()  # of a filler, the loss is ln 2, and its gradient nothing
        loss.backward()
        return Totals(loss.detach(), target_tokens, sums)


@torch.no_grad()
def _sums_over_pairs(scores: Scores, rewards: Sequence[Tensor], counted: Tensor) -> dict[str, Tensor]:
    """What the log of a step is made of; torchtune's names, each summed over pairs."""
    sums = {PAIRS: counted.sum(), "microbatches": counted.amax()}
    sums["rewards/accuracies"] = ((rewards[0] > rewards[1]) * counted).sum()
    of_rows = _logits_of_rows(scores)
    for answer, log_probs, reward, (logits, tokens) in zip(ANSWERS, scores.log_probs, rewards, of_rows, strict=True):
        sums[f"rewards/{answer}"] = (reward * counted).sum()
        sums[f"log_probs/{answer}"] = (log_probs * counted).sum()
        sums[f"logits/{answer}"] = (logits * counted).sum()
        sums[f"tokens/{answer}"] = (tokens * counted).sum()
    if scores.logits.size(0) == len(scores.row_lengths):
        for answer, logits in zip(ANSWERS, scores.logits.chunk(2), strict=True):
            sums[f"padded_logits/{answer}"] = logits.mean() * counted.amax()
    return sums


def _flaws(kind: Kind, pairs: Sequence[Sample]) -> dict[str, int]:
    """Pairs of which little can be learned: torchtune trains on them too."""
    own = [pair for pair in pairs if kind.counts(pair)]
    return {
        EMPTY: sum(0 in kind.learned_tokens(pair) for pair in own),
        IDENTICAL: sum(kind.repeats_itself(pair) for pair in own),
    }


def _logits_of_rows(scores: Scores) -> list[tuple[Tensor, Tensor]]:
    """Sums of mean logits over each row's tokens, and how many those are: of chosen answers, then of rejected ones."""
    means, lengths = scores.logits.mean(-1), scores.logits.new_tensor(scores.row_lengths)
    if means.size(0) == len(lengths):
        means = means * (torch.arange(means.size(1), device=means.device) < lengths[:, None])
    sums = sums_of_rows(means, scores.row_lengths)
    return list(zip(sums.chunk(2), lengths.chunk(2), strict=True))


def passes_of(
    policy: nn.Module, reference: nn.Module, loss_fn: nn.Module, score: Scorer, settings: Settings
) -> tuple[PairPass, PairPass]:
    """What runs a microbatch of each stage, in their order.

    Where the reference is the policy itself, its adapters are off while it is one.
    """
    activations = get_act_offloading_ctx_manager(policy, settings.enable_activation_offloading)
    train: PairPass = PolicyPass(model=policy, loss_fn=loss_fn, score=score, activations=activations)
    if isinstance(activations, OffloadActivations):
        train = leaving_nothing_offloaded(train, activations)
    as_reference = partial(without_adapters, policy) if reference is policy else nullcontext
    return ReferencePass(model=reference, score=score, as_reference=as_reference), train


def build_stages(
    policy: nn.Module,
    reference: nn.Module | None,
    loss_fn: nn.Module,
    data: Data,
    settings: Settings,
    device: torch.device,
    on_change: Callable[[Change], object],
) -> Stages[Sample]:
    """Collective: what runs both stages, in microbatches of `batch_size` pairs to begin with; without a reference, one.

    Where the reference is the policy itself, its adapters are off while it is one.
    """
    batching = batching_of(data, policy, settings, device)
    score = Scorer(batching=batching, device=device)
    refer, train = passes_of(policy, policy if reference is None else reference, loss_fn, score, settings)
    share = partial(build_recovery, settings, on_change)
    if reference in (None, policy):
        trained = asked = share(policy)
    elif settings.adaptive.precompute_reference:  # the reference is gone before training begins
        trained, asked = share(policy), share(reference)
    else:
        trained = asked = share(policy, reference)

    def runner_of(model: nn.Module, run: PairPass, stage: str, recovery: Recovery) -> StepRunner[Sample]:
        kind, limit = batching.kind.for_steps(model), RowLimit(settings.batch_size)
        return StepRunner(model, run, kind=kind, limit=limit, recovery=recovery, stage=stage)

    stages = {} if reference is None else {REFERENCE: runner_of(reference, refer, REFERENCE, asked)}
    return Stages({**stages, POLICY: runner_of(policy, train, POLICY, trained)})


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """While open, a LoRA model is what it was before it was trained, without dropout. It trains again afterwards,
    whatever happens in it."""
    training = model.training
    model.eval()
    try:
        with disable_adapter(model):
            yield
    finally:
        model.train(training)


def build_preference_loss(cfg: DictConfig) -> nn.Module:
    """The loss of the config, which has to be one of pairs: it is asked for that of two."""
    loss_fn: nn.Module = components.build("loss", cfg)
    log_probs = torch.zeros(2)
    try:
        found = loss_fn(log_probs, log_probs, log_probs, log_probs)
        fits = len(found) == 3 and all(each.shape == log_probs.shape for each in found)
    except Exception as error:  # noqa: BLE001 - a loss of another kind can fail in any way
        fits, found = False, components.in_a_line(error)
    if not fits:
        given = ", ".join(f"{key}: {value!r}" for key, value in cfg.loss.items() if key != COMPONENT)
        raise ConfigError(
            f"loss is {cfg.loss.get(COMPONENT)}{given and f' with {given}'}, which does not compute a loss and two "
            f"rewards per pair from log-probabilities of policy and reference ({shown(found)}): use one such as "
            "torchtune.rlhf.loss.DPOLoss"
        )
    return loss_fn
