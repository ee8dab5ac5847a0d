"""The entry point of recipes: reads the config, runs the recipe, and reports an error once, on the first failed rank.

config  ->  Recipe(cfg)  ->  setup()  ->  train()  ->  cleanup()
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch.distributed as dist
from omegaconf import DictConfig as DictConfig  # recipes import it from here, because this package must come first

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import config_and_overrides, read_config
from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.config.keys import REMEDIES
from torchtune_adaptive.engine.oom import fatal_on_oom
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import (
    AdaptiveError,
    CheckpointError,
    CollectiveFailedError,
    RecoveryUnsupportedError,
    Remedy,
    RunFinished,
    RunStopped,
    without_backward,
)
from torchtune_adaptive.formatting import ranks_named
from torchtune_adaptive.lifecycle.console import log_to_stderr, never_silent
from torchtune_adaptive.lifecycle.run_state import ERROR, FINISHED, STOPPED, THIS_RUN, RunPhase, saved_and_next_start
from torchtune_adaptive.lifecycle.signals import listen, stop_listening
from torchtune_adaptive.lifecycle.torchrun import exit_with_launcher, first_to_report, write_error_file

logger = logging.getLogger(__name__)


def run_recipe(recipe_type: type, keys: Collection[str] = (), remedies: Mapping[Remedy, str] = REMEDIES) -> None:
    """Collective: run a recipe with the config of the command line. Exit with status 1 if it fails. `keys` are the
    config keys that only this recipe has. `remedies` phrases the library's remedies as config keys."""
    exit_with_launcher()
    listen()
    faulthandler.enable(file=2)  # prints a traceback if a library aborts the process
    exit_with_one_message(lambda: _run(recipe_type, keys), remedies)


def _run(recipe_type: type, keys: Collection[str]) -> None:
    cfg = checked_config(keys)
    try:
        recipe = recipe_type(cfg)
        watched = never_silent(_phase) if rank() == 0 else nullcontext()
        with watched, explain_out_of_memory(recipe.run.settings.adaptive.recover_from_oom):
            _run_methods(recipe)
    except RunFinished as finished:
        if rank() == 0:
            logger.info("%s", finished)
    except RunStopped as stopped:
        if rank() == 0:
            logger.info("%s: %s; %s", THIS_RUN.stopped_by, stopped, saved_and_next_start())
            THIS_RUN.record_end(STOPPED, f"{THIS_RUN.stopped_by}: {stopped}")
    except AdaptiveError as error:
        if cfg.get("enable_activation_checkpointing") is True:  # the config has already applied this remedy
            error.remedies = without_backward(error.remedies)
        raise
    else:
        if rank() == 0:
            THIS_RUN.record_end(FINISHED)


def _phase() -> str:
    """Return what the run does; "" if a terminal shows this as a progress bar."""
    training = "" if sys.stderr.isatty() else "still training"
    phases = {RunPhase.SETTING_UP: "still setting up", RunPhase.TRAINING: training, RunPhase.LAST_SAVE: "still saving"}
    return phases.get(THIS_RUN.phase, "")


def checked_config(keys: Collection[str]) -> DictConfig:
    """Read the config of the command line. Raise a ConfigError if a key is unknown."""
    cfg = read_config(*config_and_overrides(sys.argv[1:]))
    check_keys(cfg, keys, log=rank() == 0)
    return cfg


def _run_methods(recipe: Any) -> None:
    """Collective: call the recipe's methods. If the ranks agree to stop early, raise RunStopped after the cleanup."""
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
    """Collective: return the name of the signal that stops the run, with the ranks that received it if not rank 0."""
    by_rank = {rank: number.name for rank, number in enumerate(from_all_ranks(THIS_RUN.signal)) if number is not None}
    on_ranks = "" if 0 in by_rank else f" on {ranks_named(by_rank)}"
    return f"{by_rank[min(by_rank)]}{on_ranks}"


def explain_out_of_memory(recover_from_oom: bool) -> AbstractContextManager[None]:
    """Return a context that replaces out-of-memory errors by a RecoveryUnsupportedError with remedies."""

    def explained(error: Exception) -> RecoveryUnsupportedError:
        is_off = not recover_from_oom
        why = "adaptive.recover_from_oom is False, so nothing is repeated" if is_off else "this part cannot be repeated"
        phase = "in training" if THIS_RUN.phase is RunPhase.TRAINING else "outside training"
        return RecoveryUnsupportedError(
            f"out of memory on rank {rank()} {phase}, and {why} ({in_a_line(error)})",
            Remedy.SMALLER_LIMIT,
            Remedy.SHORTER_SAMPLES,
            Remedy.CHECKPOINT_ACTIVATIONS,
            Remedy.MORE_RANKS,
            Remedy.LARGER_BUDGET,
            *([Remedy.RECOVERY] if is_off else []),
        )

    return fatal_on_oom(explained)


def exit_with_one_message(work: Callable[[], None], remedies: Mapping[Remedy, str] = REMEDIES) -> None:
    """Run `work`. If it fails, only the first failed rank reports the error, and every failed rank exits with status 1.
    Other errors than AdaptiveError are not recorded as the end of the run: their cause may be temporary."""
    try:
        log_to_stderr()
        work()
    except AdaptiveError as error:
        stop_listening()
        if first_to_report():
            report_error(error, error.in_words(remedies))
        _exit(1)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code:
            raise
        # a SystemExit with status 0, for example from a loss function, must not look like success
        stop_listening()
        if first_to_report():
            write_error_file(f"error (rank {rank()}): {in_a_line(error)}")
            sys.excepthook(type(error), error, error.__traceback__)
        _exit(1)


def report_error(error: AdaptiveError, message: str) -> None:
    """Print the message of an error, and record it as the end of the run."""
    if os.environ.get("TORCHTUNE_ADAPTIVE_TRACEBACK"):
        traceback.print_exception(error)
    peer_failed = isinstance(error, CollectiveFailedError)
    # errors about checkpoints, and those before the process group exists, about the config, are the same on all ranks
    of_this_rank = dist.is_initialized() and not isinstance(error, CheckpointError)
    on_rank = f" (rank {rank()})" if rank() != 0 and of_this_rank else ""
    text = f"{message}; {saved_and_next_start()}" if peer_failed else message
    write_error_file(f"error{on_rank}: {message}")
    print(f"\nerror{on_rank}: {text}", file=sys.stderr, flush=True)
    if not peer_failed:
        THIS_RUN.record_end(ERROR, message)


def _exit(status: int) -> NoReturn:
    """Exit this rank. The launcher then ends the other ranks."""
    sys.unraisablehook = lambda _: None  # partly constructed objects may raise in `__del__`
    sys.exit(status)


def rank() -> int:
    """Return the rank that the launcher has assigned. Works before the process group exists."""
    return int(os.environ.get("RANK", "0"))
