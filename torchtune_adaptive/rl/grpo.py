"""What is GRPO's own (arXiv 2402.03300): its keys and stages, advantages within groups of answers, and its loss.

The loss of a token is its clipped surrogate, plus what it costs to leave the reference. `loss.average` says what is
averaged:

    tokens   over all tokens of a step (DAPO, and torchtune's own recipe)
    answers  over answers, each the mean over its tokens (the paper, and TRL's "grpo")
    length   tokens summed over answers times the most tokens that an answer may have (Dr. GRPO)

Each is a sum of weighted tokens, over a number of the whole step, so it does not depend on how the step is split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from torchtune_adaptive.checkpoints.loading import load_reference
from torchtune_adaptive.config import keys
from torchtune_adaptive.config.checks import not_at_default, refuse, token_budget
from torchtune_adaptive.config.keys import (
    ABOVE_ZERO,
    BOOL,
    COUNT,
    NULL,
    Settings,
    one_of,
    option,
    read_common,
)
from torchtune_adaptive.engine.ranks import world_size
from torchtune_adaptive.engine.reports import StepResult, Totals
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.generation import Sampling
from torchtune_adaptive.rl.passes import AnswerScorer, Ask, Generate, RolloutPass
from torchtune_adaptive.rl.rollouts import (
    ADVANTAGES,
    COUNTS,
    LOG_PROBS,
    REFERENCE_LOG_PROBS,
    SCORE,
    WEIGHT,
    Rollout,
    results_of,
    store,
)
from torchtune_adaptive.rl.settings import (
    CLIP,
    FINITE_ABOVE_0,
    FINITE_OR_0,
    MOST_EPOCHS,
    NOT_FOR_PPO,
    REWARD_FUNCTIONS,
    TOKENS,
    of_rollouts,
)
from torchtune_adaptive.rl.stages import GENERATE, SCORE_POLICY, SCORE_REFERENCE, TRAIN_POLICY, RolloutStage
from torchtune_adaptive.tune.model import Checkpoint, build_frozen_model, build_full_model, drop_nothing
from torchtune_adaptive.tune.place import Place, dtype_of

REFERENCE_FILES = "ref_checkpointer"
LOSSES = ("GRPOLoss", "GRPOSimpleLoss", "GRPOCompletionLoss", "GRPOWithChunkedOutputLoss")
"""torchtune's, which no release of it has: a config may name one, and only its coefficients are used."""
EPSILON = 1e-4
"""Number that is added to the deviation of a group, as in torchtune's recipe."""


@dataclass(frozen=True, kw_only=True)
class GRPOSettings:
    """GRPO's own keys, those of torchtune's recipe first."""

    num_steps: int = option(COUNT)
    batch_size: int = option(COUNT)
    grpo_samples: int = option(COUNT)
    forward_batch_size: int = option(COUNT)
    max_generated_tokens: int = option(COUNT)
    ppo_epochs: int = option(COUNT, 1)
    temperature: float = option(FINITE_ABOVE_0, 1.0)
    top_k: int | None = option(COUNT | NULL, None)
    stop_token_ids: tuple[int, ...] | None = option(TOKENS | NULL, None)
    scale_rewards: bool = option(BOOL, True)
    without_signal: str = option(one_of("drop", "keep"), "drop")
    reward_timeout: float | None = option(ABOVE_ZERO | NULL, None)

    @property
    def answers(self) -> int:
        """Answers of a rank in an iteration."""
        return self.batch_size * self.grpo_samples

    @property
    def updates(self) -> int:
        """Optimizer steps of an iteration."""
        return self.ppo_epochs

    def iterations(self, ranks: int) -> int:
        return self.num_steps


@dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """The section `loss`."""

    epsilon: float = option(CLIP, 0.2)
    epsilon_high: float | None = option(CLIP | NULL, None)
    kl_coeff: float = option(FINITE_OR_0, 0.0)
    average: str = option(one_of("tokens", "answers", "length"), "tokens")

    @property
    def clip(self) -> tuple[float, float]:
        """By how much a ratio may fall and rise."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high


GRPO_KEYS = (REFERENCE_FILES, REWARD_FUNCTIONS, *(field.name for field in fields(GRPOSettings)))
"""Sections and keys of the config besides those of finetuning."""


def read_grpo_settings(cfg: DictConfig) -> tuple[Settings, tuple[GRPOSettings, GRPOLoss]]:
    grpo = keys.read(GRPOSettings, cfg)
    loss = keys.read(GRPOLoss, _loss_section(cfg), prefix="loss.")
    settings = read_common(
        cast(DictConfig, OmegaConf.merge({"epochs": MOST_EPOCHS, "gradient_accumulation_steps": 1}, cfg))
    )
    settings = replace(settings, config=cfg, gradient_accumulation_steps=1)
    refuse(not_at_default(settings, NOT_FOR_PPO, "GRPO"), _contradictions(cfg, grpo, loss), token_budget(settings))
    return settings, (grpo, loss)


def _loss_section(cfg: DictConfig) -> Any:
    section = cfg.get("loss")
    if not isinstance(section, DictConfig):
        return section
    named = section.get("_component_")
    if named is not None and str(named).rpartition(".")[2] not in LOSSES:
        raise ConfigError(
            f"loss._component_ is {named}, but GRPO has a loss of its own: remove the line, and keep epsilon, "
            "epsilon_high, kl_coeff and average"
        )
    return OmegaConf.create({key: value for key, value in section.items() if key != "_component_"})


def _contradictions(cfg: DictConfig, grpo: GRPOSettings, loss: GRPOLoss) -> Iterator[str]:
    if grpo.grpo_samples < 2:
        yield "grpo_samples is 1, but an answer is compared with others to its prompt: set it to 2 or more"
    if not cfg.get(REWARD_FUNCTIONS):
        yield f"{REWARD_FUNCTIONS} is missing: give a list of sections with a _component_ and a weight"
    if loss.kl_coeff and cfg.get(REFERENCE_FILES) is None:
        yield f"loss.kl_coeff is {loss.kl_coeff}, but {REFERENCE_FILES} is missing: add it, or set it to 0"
    if cfg.get("optimizer_in_bwd"):
        yield "optimizer_in_bwd is True, which updates weights inside a backward that may be repeated: set it to False"
    yield from of_rollouts(cfg, "GRPO")


def build_policies(
    settings: Settings, place: Place, checkpoint: Checkpoint, loss: GRPOLoss
) -> tuple[nn.Module, nn.Module | None]:
    """Collective: the policy, and what it is held to where leaving that costs something."""
    policy = build_full_model(settings, place, checkpoint)
    drop_nothing(policy)  # log-probabilities are compared
    if not loss.kl_coeff:
        return policy, None
    weights = load_reference(settings, REFERENCE_FILES)
    return policy, build_frozen_model(settings, place, weights, files=REFERENCE_FILES)


def grpo_stages(
    policy: nn.Module,
    reference: nn.Module | None,
    loss: GRPOLoss,
    sampling: Sampling,
    settings: Settings,
    grpo: GRPOSettings,
    device: torch.device,
) -> dict[str, RolloutStage]:
    """The stages of GRPO, in order: the policy is asked only where an iteration has several updates, the reference
    only where leaving it costs something."""
    scorer = AnswerScorer(device=device, temperature=sampling.temperature)
    generate = Generate(
        model=cast(Any, policy),
        device=device,
        dtype=dtype_of(settings, device),
        sampling=sampling,
        reshards=settings.fsdp_reshard_after_forward,
    )
    passes: dict[str, tuple[nn.Module, RolloutPass]] = {GENERATE: (policy, generate)}
    if grpo.updates > 1:
        passes[SCORE_POLICY] = policy, Ask(model=policy, ask=scorer.log_probs, name=LOG_PROBS)
    if reference is not None:
        passes[SCORE_REFERENCE] = reference, Ask(model=reference, ask=scorer.log_probs, name=REFERENCE_LOG_PROBS)
    passes[TRAIN_POLICY] = policy, TrainOnGroups(policy, scorer, loss, set(passes))
    rows = grpo.forward_batch_size * grpo.grpo_samples
    return {
        name: RolloutStage(
            model=model, run=run, samples=grpo.answers, rows=rows, trains="" if name == TRAIN_POLICY else None
        )
        for name, (model, run) in passes.items()
    }


@dataclass(frozen=True)
class TrainOnGroups:
    """A pass with a backward, through the policy's loss."""

    model: nn.Module
    scorer: AnswerScorer
    loss: GRPOLoss
    before: set[str]
    """The stages before this one. Without the policy's, the policy is still as it was when it answered."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        of = partial(results_of, rollouts, device=self.scorer.device)
        log_probs = self.scorer.log_probs(self.model, rollouts)
        loss, sums = policy_loss(
            log_probs,
            of(LOG_PROBS) if SCORE_POLICY in self.before else log_probs.detach(),
            of(REFERENCE_LOG_PROBS) if SCORE_REFERENCE in self.before else None,
            of(ADVANTAGES),
            of(COUNTS),
            of(WEIGHT),
            self.loss,
        )
        loss.backward()
        return Totals(loss.detach(), int(results_of(rollouts, COUNTS).sum()), sums)


def policy_loss(
    log_probs: Tensor,
    before: Tensor,
    reference: Tensor | None,
    advantages: Tensor,
    counts: Tensor,
    weights: Tensor,
    loss: GRPOLoss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted loss and what is logged, summed over tokens that count. Rows are answers, columns their tokens;
    `weights` are those of answers.

    The divergence from the reference is estimated from the tokens: e^d - d - 1, of its log-probabilities less ours.
    """
    change = torch.where(counts, log_probs - before, 0.0)
    ratios, (low, high) = change.exp(), loss.clip
    free, clipped = advantages * ratios, advantages * ratios.clamp(1 - low, 1 + high)
    losses, kl = -torch.minimum(free, clipped), torch.zeros_like(change)
    if reference is not None:
        apart = torch.where(counts, reference - log_probs, 0.0)
        kl = apart.exp() - apart - 1
        losses = losses + loss.kl_coeff * kl
    sums = {
        "kl": (kl * counts).sum(),
        "clipped": ((clipped < free) & counts).sum(),
        "ratios": (ratios * counts).sum(),
        "squares": (change**2).sum(),
        "log_probs": (log_probs * counts).sum(),
    }
    total = (losses * weights[:, None] * counts).sum()
    return total, {name: value.detach().float() for name, value in sums.items()}


def advantages_of(rewards: Tensor, *, scaled: bool) -> Tensor:
    """Rewards [groups, answers] above the mean of their group, over its deviation unless that is left out."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + EPSILON) if scaled else centred


@dataclass(frozen=True)
class TrainingBatch:
    """What an iteration trains on, the same on every rank."""

    rollouts: list[Rollout]
    """Rollouts that count, in equal numbers for all ranks: fillers make up what is missing."""
    divisor: int
    """Tokens or answers that the loss is a mean over."""
    figures: Mapping[str, float]


def prepared(everyone: Sequence[Rollout], grpo: GRPOSettings, loss: GRPOLoss) -> TrainingBatch:
    """Adds advantages and weights to the rollouts, which are those of all ranks, in order of their numbers."""
    rewards = results_of(everyone, SCORE).view(-1, grpo.grpo_samples)
    signal = (rewards.amax(1) > rewards.amin(1)).repeat_interleave(grpo.grpo_samples)
    counts = results_of(everyone, COUNTS)
    lengths = counts.sum(1)
    store(everyone, ADVANTAGES, advantages_of(rewards, scaled=grpo.scale_rewards).view(-1, 1).expand(counts.shape))
    weights = torch.ones(len(everyone))
    if loss.average == "answers":
        weights /= lengths.clamp(min=1)
    elif loss.average == "length":
        weights /= grpo.max_generated_tokens
    store(everyone, WEIGHT, weights)
    kept = [each for each, has in zip(everyone, signal.tolist(), strict=True) if has]
    if grpo.without_signal == "keep" or not kept:  # an iteration has its updates whatever came of it
        kept = [*everyone]
    figures = {
        "scores": float(rewards.mean()),
        "scores_deviation": float(rewards.std(1).mean()),
        "groups_without_signal": float((~signal).sum()) / grpo.grpo_samples,
        "response_lengths": float(lengths.float().mean()),
        "cut_off": float(counts.all(1).float().mean()),
    }
    divisor = len(kept) if loss.average != "tokens" else sum(each.length for each in kept)
    filled = [everyone[0].filler() for _ in range(-len(kept) % world_size())]
    return TrainingBatch([*kept, *filled], max(1, divisor), figures)


def figures_of_update(policy: StepResult, divisor: int) -> dict[str, float]:
    """The loss as it is averaged, the rest as means over the tokens of all ranks. Reading them waits for the GPU."""
    mean = {name: float(value) / max(1, policy.target_tokens) for name, value in policy.sums.items()}
    return {
        "loss": float(policy.loss_sum) / divisor,
        "kl": mean["kl"],
        "clipfrac": mean["clipped"],
        "ratios": mean["ratios"],
        "approx_policy_kl": 0.5 * mean["squares"],
        "entropy": -mean["log_probs"],
    }
