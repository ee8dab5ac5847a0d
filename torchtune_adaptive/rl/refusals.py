"""Checks that raise on unusable numbers in the iteration that computes them, and name their source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from torchtune_adaptive.errors import NotLearningError
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.rl.rollouts import LOG_PROBS, VALUES, Rollout, results_of
from torchtune_adaptive.rl.settings import LARGEST, REWARD
from torchtune_adaptive.rl.stages import FIND_VALUES, SCORE_POLICY
from torchtune_adaptive.tune.metrics import Cause


def refuse(numbers: Tensor, what: str, remedy: str) -> None:
    """Raise NotLearningError if some of the numbers [answers, ...] are NaN, infinite or too large.

    Advantages compare answers, so one bad number spoils all. Every rank must pass the same numbers.
    """
    wrong = ~(numbers.abs() <= LARGEST)
    if wrong.any():
        answers = int(wrong.reshape(len(numbers), -1).any(1).sum())
        raise NotLearningError(
            f"{what} is {float(numbers[wrong][0]):g} for {answers} of {count_of(len(numbers), 'answer')}; allowed is "
            f"{REWARD.allowed}: {remedy}"
        )


def check_weights(files: str) -> str:
    """Return the remedy for bad numbers computed by a frozen model."""
    return (
        f"check that the weights in {files}.checkpoint_files are intact, or set dtype: fp32 if they exceed the range "
        "of bf16"
    )


def cause_of_stages(rollouts: Sequence[Rollout], losses: Mapping[str, float]) -> Cause:
    """Name the first stage whose results or loss (`losses` by stage) are NaN or infinite.

    Such updates are skipped without an error, because trained models may recover.
    """
    stages = {SCORE_POLICY: LOG_PROBS, FIND_VALUES: VALUES}
    found = {stage: name for stage, name in stages.items() if name in rollouts[0].results}
    wrong = [stage for stage, name in found.items() if not results_of(rollouts, name).isfinite().all()]
    wrong += [stage for stage, loss in losses.items() if not math.isfinite(loss)]
    return Cause(f" in stage {wrong[0]}" if wrong else "")
