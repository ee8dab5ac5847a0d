"""Tells a run that learns from one that merely goes on: with NaN losses, or with nothing to learn."""

from __future__ import annotations

import logging
import math

import torch.distributed as dist

from torchtune_adaptive.errors import NotLearningError
from torchtune_adaptive.text import count_of

logger = logging.getLogger(__name__)


class LossWatch:
    """Follows the losses of a run. They are those of all ranks together, so every rank comes to the same verdict.

    Call it once the loss is a number on the host anyway, that is for the log: nothing here waits for a GPU.
    """

    def __init__(self, max_skipped_steps: int, files: str = "checkpointer.checkpoint_files") -> None:
        self._max_skipped = max_skipped_steps
        self._files = files
        self._steps = 0
        self._learning_steps = 0
        self._nan_steps = 0
        self._nan_in_a_row = 0
        self._said_why_not_saved = False

    def record(self, step: int, loss: float, target_tokens: int, grad_norm: float | None) -> None:
        """Warns of the first of several steps whose loss or gradient norm is NaN or infinite, and raises
        NotLearningError after too many. Without a norm, an optimizer in the backward has updated the weights."""
        self._steps += 1
        self._learning_steps += target_tokens > 0
        self._nan_steps += not math.isfinite(loss)
        broken = [("loss", loss), ("gradient norm", 0.0 if grad_norm is None else grad_norm)]
        facts = [f"the {name} is {value}" for name, value in broken if not math.isfinite(value)]
        if not facts:
            self._nan_in_a_row = 0
            return
        self._nan_in_a_row += 1
        fact = f"step {step}: {facts[0]}"
        if self._nan_in_a_row > self._max_skipped:
            steps = count_of(self._nan_in_a_row, "consecutive step")
            raise NotLearningError(
                f"{fact}, in {steps}, and adaptive.max_skipped_steps is {self._max_skipped}; start a new run with a "
                "lower optimizer.lr, a clip_grad_norm or dtype: fp32, from the weights of the last checkpoint if there "
                "is one"
            )
        if self._nan_in_a_row == 1 and dist.get_rank() == 0:
            skipped = grad_norm is not None and not math.isfinite(grad_norm)
            logger.warning("%s; %s", fact, "the weights are not updated" if skipped else "the weights may be NaN now")

    def worth_saving(self, step: int) -> bool:
        """Whether a step checkpoint should be saved; raises NotLearningError if every loss so far was NaN.

        Steps without a label look like progress to whoever resumes, and are none.
        """
        self.check_finite()
        worth = self._learning_steps > 0
        if not worth and not self._said_why_not_saved and dist.get_rank() == 0:
            logger.warning("step %d: no checkpoint is saved yet, since no sample so far has a token to learn", step)
        self._said_why_not_saved = not worth
        return worth

    def check(self) -> None:
        """Raises NotLearningError if no step so far has trained anything. Call it before weights are saved."""
        if self._steps == 0:
            return
        if self._learning_steps == 0:
            raise NotLearningError(
                f"nothing was trained in {count_of(self._steps, 'step')}: no sample has a token to learn (all labels "
                "are masked); check that the dataset's columns and prompt template match the data, and that "
                "tokenizer.max_seq_len, or adaptive.oversize under a token budget, does not cut off the answers"
            )
        self.check_finite()

    def check_finite(self) -> None:
        """Raises NotLearningError if every loss so far was NaN or infinite. Call it before any weights are saved."""
        if self._steps and self._nan_steps == self._steps:
            raise NotLearningError(
                f"nothing was trained in {count_of(self._steps, 'step')}: every loss was NaN or infinite; lower "
                f"optimizer.lr, or check that the weights of {self._files} are not NaN"
            )
