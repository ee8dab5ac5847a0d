"""Tells a run that learns from one that merely goes on: with NaN losses, or with nothing to learn."""

from __future__ import annotations

import logging
import math

import torch.distributed as dist

from torchtune_adaptive.errors import NotLearningError
from torchtune_adaptive.wording import count_of

logger = logging.getLogger(__name__)

STOP = "stop"


class LossWatch:
    """Follows the losses of a run. They are those of all ranks together, so every rank comes to the same verdict.

    Call it once the loss is a number on the host anyway, that is for the log: nothing here waits for a GPU.
    """

    def __init__(self, on_nan_loss: str, files: str = "checkpointer.checkpoint_files") -> None:
        self._stops = on_nan_loss == STOP
        self._files = files
        self._steps = 0
        self._learning_steps = 0
        self._nan_steps = 0
        self._said = self._said_why_not_saved = False

    def record(self, step: int, loss: float, target_tokens: int, grad_norm: float | None = None) -> None:
        """Warns, or raises NotLearningError, when the loss or the gradient norm is NaN or infinite."""
        self._steps += 1
        self._learning_steps += target_tokens > 0
        self._nan_steps += not math.isfinite(loss)
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if value is not None and not math.isfinite(value):
                self._report(f"step {step}: the {what} is {value}")
                return

    def _report(self, fact: str) -> None:
        if self._stops:
            raise NotLearningError(
                f"{fact}, and adaptive.on_nan_loss is stop; start a new run with a lower optimizer.lr, a "
                "clip_grad_norm or dtype: fp32, from the weights of the last checkpoint if there is one"
            )
        if not self._said and dist.get_rank() == 0:
            logger.warning(
                "%s; the weights are probably NaN from here on (adaptive.on_nan_loss: stop would end the run)", fact
            )
        self._said = True

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
