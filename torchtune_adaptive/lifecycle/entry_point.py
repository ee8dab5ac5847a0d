"""The entry point of recipes: read the config, run the four methods, end with the message of the first failed rank.

config  ->  Recipe(cfg)  ->  setup()  ->  train()  ->  cleanup()
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from omegaconf import DictConfig as DictConfig  # recipes import it from here: this package comes first

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import config_and_overrides, read_config
from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.config.remedies import KEYS, without_active_remedies
from torchtune_adaptive.engine.oom import fatal_on_oom
from torchtune_adaptive.engine.ranks import from_all_ranks, let_gloo_threads_finish
from torchtune_adaptive.errors import (
    AdaptiveError,
    CollectiveFailedError,
    RecoveryUnsupportedError,
    Remedy,
    RunFinished,
    RunStopped,
)
from torchtune_adaptive.formatting import ranks_named
from torchtune_adaptive.lifecycle.console import log_to_stderr, printing
from torchtune_adaptive.lifecycle.heartbeat import exit_if_blocked, exit_on_silent_rank
from torchtune_adaptive.lifecycle.run_state import ERROR, FINISHED, STOPPED, THIS_RUN, RunPhase, saved_and_next_command
from torchtune_adaptive.lifecycle.signals import listen, stop_listening
from torchtune_adaptive.lifecycle.torchrun import exit_with_launcher, first_to_report, write_error_file
from torchtune_adaptive.rehearsal_flag import REHEARSAL

logger = logging.getLogger(__name__)


def run_recipe(recipe_type: type, keys: Collection[str] = (), remedies: Mapping[Remedy, str] = KEYS) -> None:
    """Collective: run a recipe with the config of the command line; exit with status 1 on errors.

    `keys` are keys that only this recipe has. `remedies` translates the library's remedies into config keys.
    """
    exit_with_launcher()
    listen()
    faulthandler.enable(file=2)  # print a traceback if a library aborts the process
    exit_with_one_message(lambda: _run(recipe_type, keys), remedies)
    exit_if_blocked(0)


def run_query(query: Callable[[DictConfig, Path, Sequence[str]], None], keys: Collection[str]) -> None:
    """Call `query` with config, path and overrides, on rank 0 only; `keys` are keys in addition to those of recipes."""
    if not dist.is_torchelastic_launched():
        os.environ.pop("RANK", None)  # left over in the shell from another program

    def run() -> None:
        path, overrides = config_and_overrides(sys.argv[1:])
        cfg = read_config(path, overrides)
        check_keys(cfg, keys, log=True)
        with printing():
            query(cfg, path, overrides)

    if rank() == 0:
        exit_with_one_message(run)


def _run(recipe_type: type, keys: Collection[str]) -> None:
    cfg = read_config(*config_and_overrides(sys.argv[1:]))
    check_keys(cfg, keys, log=rank() == 0)
    try:
        with without_active_remedies(cfg):
            recipe = recipe_type(cfg)
            adaptive = recipe.run.settings.adaptive
            with (
                exit_on_silent_rank(adaptive.silent_rank_timeout),
                explain_out_of_memory(adaptive.recover_from_oom),
            ):
                _run_methods(recipe)
    except RunFinished as finished:
        if rank() == 0:
            logger.info("%s", finished)
    except RecoveryUnsupportedError as error:
        if THIS_RUN.phase is not RunPhase.SAVED:
            raise
        logger.warning("%s; the run is finished, but its log or picture may be incomplete", error.fact)
    except RunStopped as stopped:
        if rank() == 0:
            logger.info("%s: %s; %s", THIS_RUN.stopped_by, stopped, saved_and_next_command())
            THIS_RUN.record_end(STOPPED, f"{THIS_RUN.stopped_by}: {stopped}")
    else:
        if rank() == 0:
            THIS_RUN.record_end(FINISHED)


def _run_methods(recipe: Any) -> None:
    """Collective: call the recipe's methods; the ranks may agree to stop between two steps."""
    try:
        recipe.setup()
        THIS_RUN.phase = RunPhase.TRAINING
        recipe.train()
    except RunStopped:
        THIS_RUN.stopped_by = _received_signals()
        if THIS_RUN.phase is not RunPhase.SETTING_UP:
            recipe.cleanup()
        raise
    recipe.cleanup()


def _received_signals() -> str:
    """Collective: name the signal that stops the run, and the ranks that received it unless rank 0 did."""
    by_rank = {rank: number.name for rank, number in enumerate(from_all_ranks(THIS_RUN.signal)) if number is not None}
    where = "" if 0 in by_rank else f" on {ranks_named(by_rank)}"
    return f"{by_rank[min(by_rank)]}{where}"


def explain_out_of_memory(recover_from_oom: bool) -> AbstractContextManager[None]:
    """Convert out-of-memory errors that recovery does not handle into one message."""

    def explained(error: Exception) -> RecoveryUnsupportedError:
        off = not recover_from_oom
        why = "adaptive.recover_from_oom is False, so nothing is repeated" if off else "this part cannot be repeated"
        where = "in training" if THIS_RUN.phase is RunPhase.TRAINING else "outside training"
        return RecoveryUnsupportedError(
            f"out of memory on rank {rank()} {where}, and {why} ({in_a_line(error)})",
            Remedy.SMALLER_LIMIT,
            Remedy.SHORTER_SAMPLES,
            Remedy.CHECKPOINT_ACTIVATIONS,
            Remedy.MORE_RANKS,
            Remedy.LARGER_BUDGET,
            *([Remedy.RECOVERY] if off else []),
        )

    return fatal_on_oom(explained)


def exit_with_one_message(work: Callable[[], None], remedies: Mapping[Remedy, str] = KEYS) -> None:
    """Run `work`; the first rank that fails reports the error, once.

    At the end, the process group may still exist. `let_gloo_threads_finish` gives its threads time, since they could
    abort the exit.
    """
    try:
        log_to_stderr()
        work()
    except AdaptiveError as error:
        stop_listening()
        if first_to_report():
            _report(error, error.in_words(remedies))
        _exit(1)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code:
            raise
        stop_listening()  # an exit with status 0, for example in a loss function, would report success
        if first_to_report():
            write_error_file(f"error (rank {rank()}): {in_a_line(error)}")
            sys.excepthook(type(error), error, error.__traceback__)
        _exit(1)
    finally:
        let_gloo_threads_finish()


def _report(error: AdaptiveError, message: str) -> None:
    if os.environ.get("TORCHTUNE_ADAPTIVE_TRACEBACK"):
        traceback.print_exception(error)
    can_resume = isinstance(error, CollectiveFailedError)  # with the same command
    # before the process group exists, errors concern the config, which is the same on all ranks
    where = f" (rank {rank()})" if rank() != 0 and dist.is_initialized() else ""
    whole = f"{message}; {saved_and_next_command()}" if can_resume else message
    write_error_file(f"error{where}: {message}")
    print(f"\nerror{where}: {whole}", file=sys.stderr, flush=True)
    REHEARSAL.record("message", {"text": whole})
    if not can_resume:
        THIS_RUN.record_end(ERROR, message)


def _exit(status: int) -> NoReturn:
    """Exit this rank; the launcher ends the others."""
    sys.unraisablehook = lambda _: None  # partly constructed objects may raise in __del__
    exit_if_blocked(status)
    sys.exit(status)


def rank() -> int:
    """Return the rank that the launcher assigned, before the process group exists."""
    return int(os.environ.get("RANK", "0"))
