"""What the log tells of an iteration: torchtune's figures of PPO, and those of each stage."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torchtune.rlhf.loss import PPOLoss

from torchtune_adaptive.engine.reports import Fullest, StepResult
from torchtune_adaptive.rl.stages import FORWARD, GENERATE, TRAIN_POLICY, TRAIN_VALUE, Ran, RolloutStages

TRAJECTORY, TRAINING = (GENERATE, *FORWARD), (TRAIN_VALUE, TRAIN_POLICY)


@dataclass
class Updates:
    """The losses and figures of the updates of an iteration: each a mean over the tokens of all ranks."""

    loss: PPOLoss
    figures: list[dict[str, float]] = field(default_factory=list)

    def add(self, value: StepResult, policy: StepResult, grad_norm: float | None) -> None:
        """Reading them waits for the GPU."""
        tokens, valued = max(1, policy.target_tokens), max(1, value.target_tokens)
        policy_loss, value_loss = float(policy.loss_sum) / tokens, float(value.loss_sum) / valued
        self.figures.append(
            {
                "loss": policy_loss + self.loss.value_coeff * value_loss,
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "clipfrac": float(policy.sums["clipped"]) / tokens,
                "ratios": float(policy.sums["ratios"]) / tokens,
                "approx_policy_kl": 0.5 * float(policy.sums["squares"]) / tokens,
                **({} if grad_norm is None else {"grad_norm": grad_norm}),
            }
        )

    def means(self) -> dict[str, float]:
        return {name: sum(each[name] for each in self.figures) / len(self.figures) for name in self.figures[0]}


def figures_of_stages(stages: RolloutStages) -> dict[str, float]:
    """Tokens a second, microbatches and recoveries, of each stage and of both halves of an iteration."""
    ranks = dist.get_world_size()
    figures = {
        "tokens_per_second_per_gpu_trajectory": _rate(stages.ran, TRAJECTORY, of=GENERATE) / ranks,
        "tokens_per_second_per_gpu_ppo": _rate(stages.ran, TRAINING, of=TRAIN_POLICY) / ranks,
    }
    for stage in stages.runners:
        ran, name = stages.ran[stage], stage.replace(" ", "_")
        figures[f"{name}/tokens_per_second"] = _rate(stages.ran, (stage,), of=stage)
        figures[f"{name}/microbatches"] = sum(each.result.microbatches for each in ran)
        figures[f"{name}/microbatch_rows"] = max(each.result.load.most_rows for each in ran)
        figures[f"{name}/microbatch_tokens"] = max(each.result.load.most_tokens for each in ran)
        figures[f"{name}/recoveries"] = stages.runners[stage].recoveries
    return {**figures, "oom_recoveries": stages.runners.recoveries}


def figures_of_run(stages: RolloutStages, began: float, samples: int) -> dict[str, float]:
    """What the record has besides."""
    tokens = _tokens(stages.ran[GENERATE])
    results = [each.result for ran in stages.ran.values() for each in ran]
    measured = [each.memory for each in results if each.memory is not None]
    fullest: Fullest | None = max(measured, key=lambda each: each.peak_bytes / each.budget_bytes, default=None)
    rate = tokens / max(1e-9, time.perf_counter() - began)
    memory = {} if fullest is None else fullest._asdict()
    return {"samples": samples, "target_tokens": tokens, "target_tokens_per_second": rate, **memory}


def _rate(ran: Mapping[str, Sequence[Ran]], stages: Sequence[str], *, of: str) -> float:
    """The tokens that one stage ran, over the seconds of several."""
    seconds = sum(each.seconds for stage in stages for each in ran[stage])
    return _tokens(ran[of]) / max(1e-9, seconds)


def _tokens(ran: Sequence[Ran]) -> int:
    """Answer tokens of all ranks."""
    return sum(each.result.target_tokens for each in ran)
