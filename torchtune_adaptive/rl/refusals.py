"""Numbers that no update could use, refused in the iteration in which they arise, under the name of their source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from torchtune_adaptive.errors import NotLearningError
from torchtune_adaptive.rl.rollouts import LOG_PROBS, VALUES, Rollout, results_of
from torchtune_adaptive.rl.settings import LARGEST, REWARD
from torchtune_adaptive.rl.stages import FIND_VALUES, SCORE_POLICY
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.metrics import Cause


def refuse(numbers: Tensor, what: str, remedy: str) -> None:
    """Raise NotLearningError if some of the numbers [answers, ...] are NaN, infinite or too large: advantages compare
    answers, so one of them would spoil all. Every rank calls it with the same numbers."""
    wrong = ~(numbers.abs() <= LARGEST)
    if wrong.any():
        answers = int(wrong.reshape(len(numbers), -1).any(1).sum())
        raise NotLearningError(
            f"{what} is {float(numbers[wrong][0]):g} for {answers} of {count_of(len(numbers), 'answer')}; allowed is "
            f"{REWARD.allowed}: {remedy}"
        )


def check_weights(files: str) -> str:
    """Return the remedy where a model that is not trained computes such numbers."""
    return (
        f"check that the weights in {files}.checkpoint_files are intact, or set dtype: fp32 if they exceed the range "
        "of bf16"
    )


def cause_of_stages(rollouts: Sequence[Rollout], losses: Mapping[str, float]) -> Cause:
    """Name the first stage whose results are NaN or infinite. The trained models may recover, so these are skipped and
    not refused. `losses` by stage."""
    stages = {SCORE_POLICY: LOG_PROBS, FIND_VALUES: VALUES}
    found = {stage: name for stage, name in stages.items() if name in rollouts[0].results}
    wrong = [stage for stage, name in found.items() if not results_of(rollouts, name).isfinite().all()]
    wrong += [stage for stage, loss in losses.items() if not math.isfinite(loss)]
    return Cause(f" in stage {wrong[0]}" if wrong else "")
