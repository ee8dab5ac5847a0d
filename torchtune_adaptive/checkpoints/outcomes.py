"""What becomes of the saves of a run: told once, and known to whatever ends the run."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path

import torch.distributed as dist

from torchtune_adaptive.checkpoints import folders
from torchtune_adaptive.checkpoints.problems import GATHERS_WITH_LESS
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out
from torchtune_adaptive.errors import CheckpointError, NotLearningError, UnrecoverableError
from torchtune_adaptive.life.this_run import THIS_RUN

logger = logging.getLogger(__name__)

_AUTO = "the same command and resume_from_checkpoint=auto"


class Outcomes:
    """What has become of each save so far; a run has one of these."""

    def __init__(self, directory: Path, *, stops_on_error: bool) -> None:
        self._directory, self._stops_on_error = directory, stops_on_error
        self._passed_over = False

    def saved(self, name: str, step: int, seconds: float) -> None:
        """On every rank: it is there."""
        self._passed_over = False
        THIS_RUN.newest, THIS_RUN.newest_step = self._directory / name, step
        if dist.get_rank() == 0:
            logger.info("checkpoint %s saved in %.1f s", THIS_RUN.newest, seconds)

    def failed(self, name: str, problem: str, *, last: bool) -> None:
        """On every rank: training goes on if the config says so, but a run without its last checkpoint has failed."""
        message = f"checkpoint {name} could not be saved to {self._directory}: {problem}; {_last_good()}"
        if dist.get_rank() == 0:
            folders.discard_staged(self._directory)
        if self._stops_on_error:
            raise CheckpointError(
                f"{message}; {_once_mended()} (with adaptive.on_save_error: continue, training would have continued)"
            )
        if last:
            raise CheckpointError(f"{message}; {_once_mended()}")
        if dist.get_rank() == 0:
            logger.warning("%s; training continues (adaptive.on_save_error: continue)", message)

    def pass_over(self, name: str, *, last: bool) -> None:
        """On every rank: weights that are NaN would only push out those that are not."""
        fact = f"checkpoint {name} is not saved, because the weights are NaN or infinite; {_last_good()}"
        if last:
            raise NotLearningError(
                f"{fact}: start a new run with a lower optimizer.lr or a clip_grad_norm, from the weights of that "
                "checkpoint if there is one"
            )
        if not self._passed_over and dist.get_rank() == 0:
            logger.warning("%s; no checkpoint is saved until they are finite", fact)
        self._passed_over = True


def naming(name: str) -> AbstractContextManager[None]:
    """Names the checkpoint if gathering it runs out of memory, which no rank can repeat alone."""
    return fatal_where_memory_runs_out(
        lambda _: UnrecoverableError(
            f"out of memory while saving checkpoint {name} on rank {dist.get_rank()}; {_last_good()}; {_once_mended()}",
            *GATHERS_WITH_LESS,
        )
    )


def _last_good() -> str:
    return f"the last good one is {THIS_RUN.newest}" if _is_there() else "there is no earlier checkpoint"


def _once_mended() -> str:
    return f"once that is fixed, {'resume' if _is_there() else 'start over'} with {_AUTO}"


def _is_there() -> bool:
    return THIS_RUN.newest is not None and THIS_RUN.newest.is_dir()
