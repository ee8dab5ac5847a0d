"""What happens around a recipe: read the config, run the four methods, end with one clear message.

config  ->  Recipe(cfg)  ->  setup()  ->  train()  ->  cleanup()
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from omegaconf import DictConfig

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import config_and_overrides, read_config
from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.config.remedies import KEYS, leaving_out_what_is_set
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import (
    EarlyExitError,
    RecoveryUnsupportedError,
    Remedy,
    RunFinished,
    RunStopped,
)
from torchtune_adaptive.life import this_run
from torchtune_adaptive.life.console import outlive_readers
from torchtune_adaptive.life.heartbeat import ending_when_a_rank_is_silent
from torchtune_adaptive.life.launcher import end_with_the_launcher
from torchtune_adaptive.life.one_message import ending_well, rank
from torchtune_adaptive.life.printing import printing
from torchtune_adaptive.life.signals import listen
from torchtune_adaptive.life.this_run import THIS_RUN, Doing, saved_and_what_next
from torchtune_adaptive.text import ranks_named

logger = logging.getLogger(__name__)


Command: TypeAlias = Callable[[DictConfig, Path, Sequence[str]], None]
"""A config, its file, and the words beside it on the command line."""


def main(recipe_type: type, keys: Collection[str] = (), remedies: Mapping[Remedy, str] = KEYS) -> None:
    """Collective: runs a recipe as the command line says; exit status 1 where a user has to act. `keys` are those that
    only this recipe knows, `remedies` what the library advises, in keys of its config."""
    end_with_the_launcher()
    outlive_readers()
    listen()
    faulthandler.enable(file=2)  # where a library aborts, a run says at least what it was doing
    ending_well(lambda: _run(recipe_type, keys), remedies)


def run_without_training(question: Command, keys: Collection[str]) -> None:
    """Runs what trains nothing as the command line says, on rank 0 alone; `keys` are those beside a recipe's."""
    if not dist.is_torchelastic_launched():
        os.environ.pop("RANK", None)  # another program's, which the shell still has

    def ask() -> None:
        path, overrides = config_and_overrides(sys.argv[1:])
        cfg = read_config(path, overrides)
        check_keys(cfg, keys, aloud=True)
        with printing(), refusing_early_exits():
            question(cfg, path, overrides)

    if rank() == 0:
        ending_well(ask)


def _run(recipe_type: type, keys: Collection[str]) -> None:
    cfg = read_config(*config_and_overrides(sys.argv[1:]))
    check_keys(cfg, keys, aloud=rank() == 0)
    try:
        with refusing_early_exits(), leaving_out_what_is_set(cfg):
            recipe = recipe_type(cfg)
            adaptive = recipe.run.settings.adaptive
            with (
                ending_when_a_rank_is_silent(adaptive.silent_rank_timeout),
                telling_where_memory_runs_out(adaptive.recover_from_oom),
            ):
                _live(recipe)
    except RunFinished as finished:
        if rank() == 0:
            logger.info("%s", finished)
    except RunStopped as stopped:
        if rank() == 0:
            logger.info("%s: %s; %s", THIS_RUN.asked_by, stopped, saved_and_what_next())
            THIS_RUN.note_end(this_run.STOPPED, f"{THIS_RUN.asked_by}: {stopped}")
    else:
        if rank() == 0:
            THIS_RUN.note_end(this_run.FINISHED)


def telling_where_memory_runs_out(recover_from_oom: bool | None) -> AbstractContextManager[None]:
    """Around a run: where memory runs out and nothing is run again, one line says so."""

    def explained(error: Exception) -> RecoveryUnsupportedError:
        off = recover_from_oom is False
        why = "adaptive.recover_from_oom is False, so nothing is repeated" if off else "this part cannot be repeated"
        where = "in training" if THIS_RUN.doing is Doing.TRAINING else "outside training"
        return RecoveryUnsupportedError(
            f"out of memory on rank {rank()} {where}, and {why} ({in_a_line(error)})",
            Remedy.SMALLER_LIMIT,
            Remedy.SHORTER_SAMPLES,
            Remedy.CHECKPOINT_ACTIVATIONS,
            Remedy.MORE_RANKS,
            Remedy.LARGER_BUDGET,
            *([Remedy.RECOVERY] if off else []),
        )

    return fatal_where_memory_runs_out(explained)


def _live(recipe: Any) -> None:
    """Collective: the life of a recipe, which all ranks may agree to cut short between two steps."""
    try:
        recipe.setup()
        THIS_RUN.doing = Doing.TRAINING
        recipe.train()
    except RunStopped:
        THIS_RUN.asked_by = _who_was_asked()
        if THIS_RUN.doing is not Doing.SETTING_UP:
            recipe.cleanup()
        raise
    recipe.cleanup()


def _who_was_asked() -> str:
    """Collective: the signal that ends the run, and which ranks have heard it, unless rank 0 has."""
    by_rank = {rank: number.name for rank, number in enumerate(from_all_ranks(THIS_RUN.signal)) if number is not None}
    where = "" if 0 in by_rank else f" on {ranks_named(by_rank)}"
    return f"{by_rank[min(by_rank)]}{where}"


@contextmanager
def refusing_early_exits() -> Iterator[None]:
    """Makes `sys.exit(0)` an error: called in a loss, for example, it would report success for no training."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        called = traceback.extract_tb(error.__traceback__)[-1]
        raise EarlyExitError(
            f"sys.exit({error.code!r}) in {called.name} ({called.filename}, line {called.lineno}) ended the run early; "
            "raise an error there, or return"
        ) from error
