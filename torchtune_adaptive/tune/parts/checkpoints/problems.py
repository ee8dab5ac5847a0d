"""What becomes of a checkpoint that is written or read, and what can go wrong, in words that a user can act on."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torchtune.utils import get_logger

from torchtune_adaptive.errors import CheckpointError, NotLearningError, Remedy, UnrecoverableError
from torchtune_adaptive.memory.oom import fatal_where_memory_runs_out, forget_frames, is_oom, release
from torchtune_adaptive.memory_sizes import format_bytes
from torchtune_adaptive.tune.config.components import reason
from torchtune_adaptive.tune.config.remedies import KEYS
from torchtune_adaptive.tune.parts.checkpoints import folders
from torchtune_adaptive.tune.start.this_run import THIS_RUN

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
_AUTO = "the same command with resume_from_checkpoint=auto"
GATHERS_WITH_LESS = (Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)
"""What helps a save, in which no rows are run."""

NEARLY_FULL_BYTES = 2**20
"""Bytes that may still be free after a write has failed for want of room: less than a block, on most systems."""


SHORT_WRITES = ("unexpected pos", "PytorchStreamWriter failed", "basic_ios::clear")
"""torch's words for a write that the operating system cut short; it drops the error that says why."""


class Outcomes:
    """What becomes of the saves of a run: told once, and known to whatever ends the run."""

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
                f"{message}; {_once_mended()} (adaptive.on_save_error: continue would have trained on without it)"
            )
        if last:
            raise CheckpointError(f"{message}; {_once_mended()}")
        if dist.get_rank() == 0:
            logger.warning("%s; training goes on (adaptive.on_save_error: continue)", message)

    def pass_over(self, name: str, *, last: bool) -> None:
        """On every rank: weights that are NaN would only push out those that are not."""
        fact = f"checkpoint {name} is not saved, since the weights are NaN or infinite; {_last_good()}"
        if last:
            raise NotLearningError(
                f"{fact}: start a new run, from those weights if there are any, with a lower optimizer.lr or a "
                "clip_grad_norm"
            )
        if not self._passed_over and dist.get_rank() == 0:
            logger.warning("%s; no later one is saved either while they are", fact)
        self._passed_over = True


def naming(name: str) -> AbstractContextManager[None]:
    """Names the checkpoint if gathering it runs out of memory, which no rank can repeat alone."""
    return fatal_where_memory_runs_out(
        lambda _: UnrecoverableError(
            f"out of memory while saving checkpoint {name} on rank {dist.get_rank()}; {_last_good()}, and "
            f"{_once_mended()}",
            *GATHERS_WITH_LESS,
        )
    )


def _last_good() -> str:
    return f"the last good one is {THIS_RUN.newest}" if _is_there() else "there is no earlier checkpoint"


def _once_mended() -> str:
    return f"once that is fixed, {_AUTO} {'goes on' if _is_there() else 'starts over'}"


def _is_there() -> bool:
    return THIS_RUN.newest is not None and THIS_RUN.newest.is_dir()


def cause(error: BaseException, directory: Path) -> str:
    """Why a checkpoint could not be written. torch's writers fail with texts of their own when a disk is full."""
    if is_oom(error):
        return f"out of memory on rank {dist.get_rank()}: {' or '.join(KEYS[each] for each in GATHERS_WITH_LESS)}"
    if isinstance(error, MemoryError):
        return f"out of memory on the host of rank {dist.get_rank()}: leave it more"
    if not directory.is_dir() or (isinstance(error, FileNotFoundError) and error.errno is None):
        return "the folder is gone"
    free = folders.free_bytes(directory)
    number = _errno(error)
    if number is not None:
        text = os.strerror(number)
    elif free < NEARLY_FULL_BYTES:
        text = "no space left"
    elif any(sign in str(error) for sign in SHORT_WRITES):
        text = "a file was cut off while it was written: a quota, or a limit on the size of files"
    else:
        text = reason(error)
    return f"{text} ({format_bytes(free)} free)"


def tried(work: Callable[[], Value], directory: Path) -> tuple[Value | None, str | None]:
    """What this rank does alone for a checkpoint, or why it could not: the others are to hear of it."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, a rank that raised would leave the others waiting
        problem = cause(error, directory)
        forget_frames(error)
    release()
    return None, problem


def require_folder(path: Path) -> None:
    """Refuses a folder that is gone: torchtune would create the path anew, on whatever file system is left."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is gone")


@contextmanager
def quiet_torchtune() -> Iterator[None]:
    """Silences torchtune's lines, which name the staging folder, where nothing stays."""
    talker = get_logger()
    level = talker.level
    talker.setLevel(logging.WARNING)
    try:
        yield
    finally:
        talker.setLevel(level)


@functools.cache
def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torchtune-adaptive", "torch", "torchtune", "torchao")}


def _errno(error: BaseException | None) -> int | None:
    """The number of the operating system's error at the bottom of this one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None
