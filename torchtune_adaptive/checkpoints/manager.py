"""Loads and saves weights and state with torchtune's checkpointers.

A run loads the checkpoint that `resuming.py` has chosen. Every rank reads the same files. If loading fails on any rank,
all ranks raise the error of the lowest such rank. If the run is killed at any moment, the last checkpoint is intact.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer
from torchtune import training
from torchtune.utils import get_logger

from torchtune_adaptive.checkpoints import rank_0, store
from torchtune_adaptive.checkpoints.contents import (
    AnyOptimizer,
    Contents,
    RandomState,
    capture_random_state,
    gather_optimizer_state,
    gather_weights,
    restore_random_state,
    weights_are_finite,
)
from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.checkpoints.resuming import Start, identity_of
from torchtune_adaptive.checkpoints.store import Checkpointer, Files, Manifest, State
from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT, in_a_line
from torchtune_adaptive.config.keys import REMEDIES, Settings
from torchtune_adaptive.engine.oom import fatal_on_oom, is_oom
from torchtune_adaptive.engine.ranks import Value, explaining_failures, from_all_ranks
from torchtune_adaptive.engine.snapshot import RngState
from torchtune_adaptive.errors import (
    AdaptiveError,
    CheckpointError,
    ConfigError,
    Remedy,
    RunStopped,
    UnrecoverableError,
)
from torchtune_adaptive.formatting import format_bytes
from torchtune_adaptive.lifecycle.console import log_rank_0
from torchtune_adaptive.lifecycle.run_state import SAME_COMMAND, THIS_RUN, RunPhase, now

logger = logging.getLogger(__name__)

FOR_SAVES = (Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)
"""Remedies for an out-of-memory error in a save."""


def build_checkpointer(cfg: DictConfig, staging: Path, files: Files | None) -> Checkpointer:
    """Build torchtune's checkpointer, which reads the files to resume from and writes to the staging directory."""
    section = section_that_saves(cfg, "checkpointer", staging)
    if files is not None:
        # torchtune looks for an adapter in the last epoch of output_dir, and fails if there is no folder of an epoch
        (staging / "epoch_0").mkdir(parents=True, exist_ok=True)
        section.update(recipe_checkpoint=files.recipe_state, adapter_checkpoint=files.adapter)
        if files.adapter is None:  # with an adapter, the config names the base weights
            section["checkpoint_files"] = list(files.weights)
    resumes = files is not None
    return components.build_section("checkpointer", OmegaConf.create(section), should_load_recipe_state=resumes)


def load_reference(settings: Settings, key: str = "ref_checkpointer") -> State:
    """Collective: load the frozen weights that the checkpointer in section `key` of the config names."""
    section = section_writing_to(settings.config, key, Path(settings.output_dir) / store.SAVING)
    checkpointer = components.build_section(key, OmegaConf.create(section), should_load_recipe_state=False)
    weights: State = load_on_all_ranks(checkpointer.load_checkpoint, "the weights", key)[training.MODEL_KEY]
    return weights


def section_that_saves(cfg: DictConfig, key: str, staging: Path) -> dict[str, Any]:
    """Return the section of a checkpointer, as `section_writing_to` does. Raise ConfigError if saves would grow."""
    section = section_writing_to(cfg, key, staging)
    given = Path(str(section.get("checkpoint_dir"))).resolve()
    if str(section.get(COMPONENT)).startswith("torchtune.") and staging.resolve().is_relative_to(given):
        raise ConfigError(
            f"output_dir is inside {key}.checkpoint_dir ({given}), whose files torchtune copies into every checkpoint, "
            "so each would contain all earlier ones: set output_dir to a folder outside of it"
        )
    return section


def section_writing_to(cfg: DictConfig, key: str, staging: Path) -> dict[str, Any]:
    """Return the section of a checkpointer, with the staging directory as its output directory. Raise ConfigError if
    the directory of weights is missing. torchtune's error names neither key nor directory."""
    section = components.require(cfg, key)
    directory = section.get("checkpoint_dir")
    creates_files = not str(section.get(COMPONENT)).startswith("torchtune.training.")  # as the demo's checkpointer
    if not isinstance(directory, str) or not (creates_files or os.path.isdir(directory)):
        raise ConfigError(
            f"{key}.checkpoint_dir is {directory!r}, which is not a directory: "
            "download the weights first (tune download) or correct the path"
        )
    plain: Any = OmegaConf.to_container(section, resolve=True)
    return {**plain, "output_dir": str(staging)}


def load_on_all_ranks(work: Callable[[], Value], what: str, key: str = "checkpointer") -> Value:
    """Collective: run `work` on all ranks. If it fails on any, raise the error of the lowest such rank on all."""
    result, problem = None, None
    try:
        result = work()
    except AdaptiveError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - damaged files can raise any error
        if is_oom(error) or isinstance(error, MemoryError):
            problem = (
                f"out of memory while loading {what} on rank {dist.get_rank()}: use more ranks, or a smaller model"
            )
        else:
            problem = f"{key}: loading {what} failed on rank {dist.get_rank()}: {in_a_line(error)}"
    problems, stop_requested = zip(*from_all_ranks((problem, THIS_RUN.stop_requested())), strict=True)
    first = next(filter(None, problems), None)
    if first is not None:
        raise CheckpointError(first)
    if any(stop_requested):
        raise RunStopped("stopped during setup, before the first step")
    return cast(Value, result)


class CheckpointManager:
    """Loads and saves the checkpoints of one run, in torchtune's formats."""

    def __init__(
        self,
        settings: Settings,
        start: Start,
        contents: Contents,
        device: torch.device,
        build: Callable[[DictConfig, Path, Files | None], Checkpointer] = build_checkpointer,
    ) -> None:
        self._start = start
        self._contents = contents
        self._device = device
        self._directory = start.directory
        self._settings = settings
        self._serial = start.serial
        self._checkpointer = build(settings.config, self._directory.staging, start.files)
        self._identity = identity_of(settings.config, contents.recipe, start.samples_per_step)
        self._random_state_folder = start.files.folder if start.files else None  # folder of the random state to restore
        self._stop_requested = False
        THIS_RUN.newest_checkpoint = start.files.folder if start.files else None
        if settings.enable_async_checkpointing:
            log_rank_0("enable_async_checkpointing has no effect: training waits for each save")
        if settings.config.checkpointer.get("output_dir") not in (None, settings.output_dir):
            log_rank_0(f"checkpointer.output_dir has no effect: checkpoints are in output_dir ({settings.output_dir})")

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint. A run that ends now can resume from it."""
        return THIS_RUN.newest_checkpoint

    def load(self) -> State:
        """Collective: return the initial weights, or the weights and state of the checkpoint to resume from."""
        files = self._start.files
        what = f"checkpoint {files.folder}" if files else "the weights"
        return load_on_all_ranks(self._checkpointer.load_checkpoint, what)

    @contextmanager
    def continue_random_state(self, progress: Progress) -> Iterator[None]:
        """Collective: restore the checkpoint's random state before or after the body, which starts an epoch's loader.

        A starting loader draws a random number. A checkpoint between epochs was saved before that draw, so its state is
        restored before the body. A checkpoint within an epoch was saved after the draw, so its state is restored after
        the body. Only the first call restores a state.
        """
        if not progress.steps_in_epoch:
            self._restore_random_state()
        rng = RngState.capture()
        yield
        if progress.steps_in_epoch:
            rng.restore()
        self._restore_random_state()

    def _restore_random_state(self) -> None:
        if self._random_state_folder is None:
            return
        problem = restore_random_state(self._random_state_folder)
        self._random_state_folder = None
        if problem is not None:
            log_rank_0(f"random draws (dropout) restart from the seed: {problem}")

    def is_due(self, progress: Progress, stop_requested: bool) -> bool:
        """Return True if a checkpoint must be saved now, within an epoch. The end of an epoch always saves one."""
        every, sizes = self._settings.save_every_n_steps, progress.current_epoch
        within_epoch = sizes is not None and progress.steps_in_epoch < sizes.steps
        return within_epoch and (stop_requested or (every is not None and progress.step % every == 0))

    def warn_without_room(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Log a warning on rank 0 if the next checkpoint does not fit on the disk."""
        if dist.get_rank() != 0:
            return
        size, place = self._contents.size(model, optimizers), self._directory.path
        with suppress(OSError):
            if size > (free := shutil.disk_usage(place).free):
                text = "a checkpoint takes about %s, but %s has %s free: make room before the next save, or it fails"
                logger.warning(text, format_bytes(size), place, format_bytes(free))

    def save(
        self, progress: Progress, model: nn.Module, optimizer: AnyOptimizer, loader_state: Mapping[str, object]
    ) -> None:
        """Collective: save a checkpoint, named after the step or the finished epoch. Raises CheckpointError."""
        if progress.finished:
            THIS_RUN.phase = RunPhase.LAST_SAVE
        name, began = progress.name_of_checkpoint(), time.perf_counter()
        finite, random_states = zip(*from_all_ranks((weights_are_finite(model), capture_random_state())), strict=True)
        if not all(finite):  # otherwise pruning could replace all good checkpoints by bad ones
            raise CheckpointError(
                f"checkpoint {name} is not saved, because the weights are NaN or infinite; {_last_good()}: start a new "
                f"run{' from there' * bool(self.last)}, with a lower optimizer.lr or a clip_grad_norm"
            )
        gathering = explaining_failures(f"gathering checkpoint {name}", in_other_code=True)
        with fatal_on_oom(partial(out_of_memory_in, name)), gathering:
            optimizer_state = gather_optimizer_state(model, optimizer, self._device)
            weights = gather_weights(self._contents.sharded(model), self._device)
        state = {**progress.recipe_state(), training.DATALOADER_KEY: dict(loader_state)}

        def write() -> tuple[str | None, bool, bool]:
            failure = None
            try:
                converted = self._contents.for_checkpointer(weights, model)
                self._write(progress, {**converted, **state, training.OPT_KEY: optimizer_state}, list(random_states))
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
                failure = self._not_saved(name, describe_failure(error, self._directory.path))
            return failure, os.path.isdir(self._directory.staging), THIS_RUN.stop_requested()

        stuck = self._not_saved(name, rank_0.no_progress())
        failure, is_ours, self._stop_requested = rank_0.run(write, if_stuck=(stuck, True, False))
        if failure is not None:
            if not is_ours:  # the directory may belong to another run now
                THIS_RUN.record_directory = None
            self.close()
            raise CheckpointError(failure)
        THIS_RUN.newest_checkpoint = self._directory.path / name
        if progress.finished:
            THIS_RUN.phase = RunPhase.SAVED
        log_rank_0(f"checkpoint {self.last} saved in {time.perf_counter() - began:.1f} s")

    def _write(self, progress: Progress, state: State, random_states: list[RandomState]) -> None:
        """On rank 0: write the checkpoint into the staging directory, rename it to its place, and prune older ones."""
        epoch, staging = progress.epochs_run, self._directory.staging
        if not staging.is_dir():
            raise FileNotFoundError(f"{staging} is missing: another run may have started in the directory")
        options = {"adapter_only": True} if self._contents.adapter_only else {}
        torchtune_logger = get_logger()
        level = torchtune_logger.level
        torchtune_logger.setLevel(logging.WARNING)  # hides lines that name files in the staging directory
        written = staging / f"epoch_{epoch}"
        try:
            self._checkpointer.save_checkpoint(state, epoch=epoch, intermediate_checkpoint=True, **options)
            torch.save(random_states, written / store.RANDOM_FILE)
        finally:
            torchtune_logger.setLevel(level)
        os.replace(staging / store.RECIPE_STATE / store.RECIPE_STATE_FILE, written / store.RECIPE_STATE_FILE)
        latest = progress.epochs_started[-1]
        manifest = Manifest(
            serial=self._serial,
            position=progress.position,
            finished=progress.finished,
            ranks=dist.get_world_size(),
            latest_step_samples=latest.samples_per_step * progress.ranks,
            identity=self._identity,
            saved_at=now(),
            files=store.record_files(written),
        )
        store.write_manifest(written, manifest)
        store.publish(self._directory, written, progress.name_of_checkpoint())
        self._serial += 1
        try:
            store.prune(self._directory.path, self._settings.keep_last_n_checkpoints)
        except OSError as error:  # only a warning, because the new checkpoint is complete
            logger.warning(
                "older checkpoints in %s could not be removed: %s", self._directory.path, error.strerror or error
            )

    def _not_saved(self, name: str, cause: str) -> str:
        place = self._directory.path
        return f"checkpoint {name} could not be saved to {place}: {cause}; {_last_good()}; {_once_fixed()}"

    def stop_if_asked(self, progress: Progress, stop_requested: bool) -> None:
        """Raise RunStopped if the ranks have agreed to stop, unless the run is finished. Call it after a save."""
        if (stop_requested or self._stop_requested) and not progress.finished:
            raise RunStopped(f"stopped after step {progress.step}")

    def close(self) -> None:
        """Remove the staging directory."""
        if dist.get_rank() == 0:
            shutil.rmtree(self._directory.staging, ignore_errors=True)
            with suppress(OSError):
                self._directory.staging.parent.rmdir()


def describe_failure(error: Exception, directory: Path) -> str:
    """Return the cause of a failed save, with a remedy if memory ran out, or else the free space of the disk."""
    if not os.path.exists(directory):  # unlike `Path.exists`, never raises
        return f"{directory} is gone ({in_a_line(error)})"
    if is_oom(error):
        return f"out of memory on rank {dist.get_rank()}: {' or '.join(REMEDIES[remedy] for remedy in FOR_SAVES)}"
    try:
        return f"{in_a_line(error)} ({format_bytes(shutil.disk_usage(directory).free)} free)"
    except OSError:
        return in_a_line(error)


def out_of_memory_in(name: str, error: Exception) -> UnrecoverableError:
    """Return the error for running out of memory while gathering, which a single rank cannot repeat."""
    return UnrecoverableError(
        f"out of memory while saving checkpoint {name} on rank {dist.get_rank()}; {_last_good()}; {_once_fixed()}",
        *FOR_SAVES,
    )


def _last_good() -> str:
    last = THIS_RUN.newest_checkpoint
    return f"the last good one is {last}" if last else "there is no earlier checkpoint"


def _once_fixed() -> str:
    again = "resume" if THIS_RUN.newest_checkpoint else "start over"
    return f"once that is fixed, {again} with {SAME_COMMAND}"
