"""What the log tells of an iteration: torchtune's figures of PPO, and those of each stage."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from torchtune_adaptive.rl.stages import GENERATE, TRAIN_POLICY, RolloutStages


class Updates:
    """Figures of the updates of an iteration, each a mean over the tokens of all ranks; and how many were skipped."""

    def __init__(self) -> None:
        self._figures: list[dict[str, float]] = []
        self._skipped = 0

    def add(self, figures: Mapping[str, float], grad_norm: float | None) -> None:
        self._skipped += grad_norm is not None and not math.isfinite(grad_norm)
        self._figures.append({**figures, **({} if grad_norm is None else {"grad_norm": grad_norm})})

    def means(self) -> dict[str, float]:
        """Means over the iteration, which is over; and the updates of the run whose gradients were not finite."""
        figures, self._figures = self._figures, []
        means = {name: sum(update[name] for update in figures) / len(figures) for name in figures[0]}
        return {**means, "skipped_updates": self._skipped}


def figures_of_stages(stages: RolloutStages) -> dict[str, float]:
    """Tokens a second, microbatches and recoveries, of each stage and of both halves of an iteration."""
    ranks = dist.get_world_size()
    trajectory = stages.before_training
    training = [name for name in stages.stages if name not in trajectory]
    figures = {
        "tokens_per_second_per_gpu_trajectory": _rate(stages, GENERATE, trajectory) / ranks,
        "tokens_per_second_per_gpu_ppo": _rate(stages, TRAIN_POLICY, training) / ranks,
    }
    for stage, results in stages.results.items():
        name = stage.replace(" ", "_")
        figures[f"{name}/tokens_per_second"] = _rate(stages, stage, (stage,))
        figures[f"{name}/microbatches"] = sum(result.microbatches for result in results)
        figures[f"{name}/microbatch_rows"] = max(result.load.most_rows for result in results)
        figures[f"{name}/microbatch_tokens"] = max(result.load.most_tokens for result in results)
        figures[f"{name}/recoveries"] = stages.runners[stage].recoveries
    return {**figures, "oom_recoveries": stages.runners.recoveries}


def figures_of_run(stages: RolloutStages, began: float, samples: int) -> dict[str, float]:
    """What the record has besides."""
    tokens = sum(result.target_tokens for result in stages.results[GENERATE])
    peaks = [result.memory for results in stages.results.values() for result in results if result.memory is not None]
    fullest = max(peaks, key=lambda peak: peak.peak_bytes / peak.budget_bytes, default=None)
    rate = tokens / max(1e-9, time.perf_counter() - began)
    memory = {} if fullest is None else fullest._asdict()
    return {"samples": samples, "target_tokens": tokens, "target_tokens_per_second": rate, **memory}


def _rate(stages: RolloutStages, of: str, during: Sequence[str]) -> float:
    """Answer tokens of all ranks in one stage, over the seconds of several."""
    tokens = sum(result.target_tokens for result in stages.results[of])
    return tokens / max(1e-9, sum(stages.seconds[stage] for stage in during))
