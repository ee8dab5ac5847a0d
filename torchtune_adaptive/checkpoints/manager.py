"""Checkpoints of a run: loads the one to resume from, and saves new ones, in the foreground or in a thread.

A kill at any moment leaves the previous checkpoint intact.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import tree_map
from torchtune import training
from torchtune.utils import get_logger

from torchtune_adaptive.atomic_files import replace_file
from torchtune_adaptive.checkpoints import loading, store
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
from torchtune_adaptive.checkpoints.identity import identity_of
from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.checkpoints.resuming import Start
from torchtune_adaptive.checkpoints.store import Checkpointer, Files, Manifest, State
from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out, is_oom
from torchtune_adaptive.engine.ranks import from_all_ranks, from_rank_0, gloo_group_aside
from torchtune_adaptive.engine.snapshot import RngState, copied_to_host
from torchtune_adaptive.errors import CheckpointError, NotLearningError, Remedy, RunStopped, UnrecoverableError
from torchtune_adaptive.formatting import count_of, format_bytes
from torchtune_adaptive.lifecycle.console import log_if_slow, say
from torchtune_adaptive.lifecycle.run_state import THIS_RUN, RunPhase, now

logger = logging.getLogger(__name__)

REMEDIES = (Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)
"""Remedies for running out of memory in a save."""
GONE = "the folder is gone"
SMALL_WRITE_BYTES = 2**22


class Written(NamedTuple):
    """A checkpoint in the staging directory, without its manifest and random generators."""

    name: str
    manifest: Manifest
    random_states: list[RandomState]


class CheckpointManager:
    """Loads and saves the checkpoints of one run, in torchtune's formats."""

    def __init__(
        self,
        settings: Settings,
        start: Start,
        contents: Contents,
        device: torch.device,
        build: Callable[[DictConfig, Path, Files | None], Checkpointer] = loading.build_checkpointer,
    ) -> None:
        """Collective: create the process group for background saves, if they are enabled."""
        self._start = start
        self._contents = contents
        self._device = device
        self._claim = start.claim
        self._directory, self._staging = start.claim.directory, start.claim.staging
        self._save_every = settings.save_every_n_steps
        self._keep_last, self._keep_best = settings.keep_last_n_checkpoints, settings.keep_best_checkpoint
        self._serial = start.serial
        # A restarted launcher repeats its command, which may name this checkpoint; `auto` needs only the newest.
        named = start.files if settings.resume_from_checkpoint is True else None
        self._always_kept = named.folder.name if named else None
        self._checkpointer = build(settings.config, self._staging, start.files)
        # only on rank 0, which writes the manifest; after `build`, where the demo's checkpointer creates its files
        self._identity = identity_of(settings.config, contents.recipe) if dist.get_rank() == 0 else {}
        self._background = BackgroundSave(self._publish) if settings.enable_async_checkpointing else None
        self._random_state_in = start.files.folder if start.files else None
        self._asked_to_stop = False
        THIS_RUN.newest = start.files.folder if start.files else None

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint, from which a run that ends now can resume."""
        return THIS_RUN.newest

    def remove_overwritten(self) -> None:
        """On rank 0: remove the checkpoints of an overwritten run, just before training starts."""
        if self._start.overwrites and dist.get_rank() == 0:
            removed = count_of(self._start.overwrites, "checkpoint")
            logger.warning("overwrite_output_dir: %s in %s removed", removed, self._directory)
            store.remove_all(self._directory)

    @log_if_slow("read the weights")
    def load(self) -> State:
        """Collective: return the initial weights, or the weights and state of the checkpoint to resume from."""
        return loading.load(self._checkpointer, self._start.files)

    def resume(self, base: State, model: nn.Module, optimizer: AnyOptimizer) -> State:
        """Collective: return the recipe state to resume; load a distributed checkpoint into model and optimizer."""
        files = self._start.files
        if files is None or not files.distributed:
            return base
        group = self._background.group if self._background else None
        return loading.load_distributed(files.folder, model, optimizer, group)

    @contextmanager
    def continue_random_state(self, progress: Progress) -> Iterator[None]:
        """Collective: restore the random state of a resumed run once, around the start of an epoch.

        There the loader draws a random number. A checkpoint within an epoch was saved after that draw, and one between
        epochs before it.
        """
        if not progress.steps_in_epoch:
            self._restore_random_state()
        rng = RngState.capture()
        yield
        if progress.steps_in_epoch:
            rng.restore()
        self._restore_random_state()

    def _restore_random_state(self) -> None:
        if self._random_state_in is None:
            return
        reason = restore_random_state(self._random_state_in)
        self._random_state_in = None
        if reason is not None:
            say(f"random draws (dropout) restart from the seed: {reason}")

    def is_due(self, progress: Progress, asked_to_stop: bool) -> bool:
        """Return True if a checkpoint is due within an epoch; every epoch ends with one anyway."""
        every, sizes = self._save_every, progress.begun
        within = sizes is not None and progress.steps_in_epoch < sizes.steps
        return within and (asked_to_stop or (every is not None and progress.step % every == 0))

    def save(
        self, progress: Progress, model: nn.Module, optimizer: AnyOptimizer, loader_state: Mapping[str, object]
    ) -> None:
        """Collective: save a checkpoint, named after the step or the finished epoch. Raises CheckpointError."""
        if progress.finished:
            THIS_RUN.phase = RunPhase.LAST_SAVE
        self.wait()
        background = None if progress.finished else self._background
        name = progress.name_of_checkpoint(distributed=background is not None)
        lost = self._check_directory()  # first, because torch would recreate the staging directory
        finite, lost_on_ranks, random_states = zip(
            *from_all_ranks((weights_are_finite(model), lost, capture_random_state())), strict=True
        )
        manifest = Manifest(
            serial=self._serial,
            position=progress.position,
            finished=progress.finished,
            distributed=background is not None,
            ranks=dist.get_world_size(),
            identity=self._identity,
            saved_at=now(),
            files={},
            best_step=progress.best_step if self._keep_best else None,
        )
        self._serial += 1
        written = Written(name, manifest, list(random_states))
        if not all(finite):  # pruning would then remove good checkpoints
            raise NotLearningError(
                f"checkpoint {name} is not saved, because the weights are NaN or infinite; {_last_good()}: start a new "
                f"run with a lower optimizer.lr or a clip_grad_norm{', from its weights' * bool(THIS_RUN.newest)}"
            )
        if lost_on_ranks[0] is not None:
            self._end_run_without_directory(written, lost_on_ranks[0])
        state = {**progress.recipe_state(), training.DATALOADER_KEY: dict(loader_state)}
        began = time.perf_counter()
        with fatal_where_memory_runs_out(partial(out_of_memory_in, name)):
            if background is not None:
                state |= {training.MODEL_KEY: model.state_dict(), training.OPT_KEY: optimizer.state_dict()}
                background.start(self._staging / name, copy_of(state), written)
                return
            optimizer_state = gather_optimizer_state(model, optimizer, self._device)
            weights = gather_weights(self._contents.sharded(model), self._device)
        problem = None
        if dist.get_rank() == 0:
            try:
                whole = {**self._contents.finished(weights, model), **state, training.OPT_KEY: optimizer_state}
                self._write(written, whole)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
                problem = describe_failure(error, self._directory)
        self._conclude(written, problem, time.perf_counter() - began)

    def _write(self, written: Written, state: State) -> None:
        """On rank 0: write with torchtune's checkpointer into the staging directory, then publish."""
        epoch = written.manifest.position.epochs
        options = {"adapter_only": True} if self._contents.adapter_only else {}
        torchtunes = get_logger()
        level = torchtunes.level
        torchtunes.setLevel(logging.WARNING)  # its lines name files in the staging directory
        try:
            self._checkpointer.save_checkpoint(state, epoch=epoch, intermediate_checkpoint=True, **options)
        finally:
            torchtunes.setLevel(level)
        folder = self._staging / f"epoch_{epoch}"
        recipe_state = self._staging / store.RECIPE_STATE / store.RECIPE_STATE_FILE
        os.replace(recipe_state, folder / store.RECIPE_STATE_FILE)
        if folder.name != written.name:
            folder.rename(self._staging / written.name)
        self._publish(written)

    def _publish(self, written: Written) -> None:
        """On rank 0: add random state and manifest, rename the directory to its place, and prune."""
        name, manifest, random_states = written
        staged = self._staging / name
        torch.save(random_states, staged / store.RANDOM_FILE)
        store.write_manifest(staged, replace(manifest, files=store.record_files(staged)))
        THIS_RUN.newest = store.publish(self._claim, name)
        try:
            store.prune(self._directory, self._keep_last, self._always_kept, self._start.damaged)
        except OSError as error:  # the new checkpoint is complete
            logger.warning("older checkpoints in %s could not be removed: %s", self._directory, error.strerror)

    def stop_if_asked(self, progress: Progress, asked_to_stop: bool) -> None:
        """Collective: after a save, raise RunStopped if the ranks have agreed to stop before the end."""
        if (asked_to_stop or self._asked_to_stop) and not progress.finished:
            self.wait()
            raise RunStopped(f"stopped after step {progress.step}")

    def wait(self) -> None:
        """Collective: wait for a background save, and agree on its outcome."""
        if self._background is None or (written := self._background.written) is None:
            return
        error = self._background.wait()
        problems = from_all_ranks(None if error is None else describe_failure(error, self._directory))
        problem = next(filter(None, problems), None)
        self._conclude(written, problem, self._background.seconds)

    def close(self) -> None:
        """Collective: finish a background save and remove the staging directory."""
        self.wait()
        self._release()

    def _conclude(self, written: Written, problem: str | None, seconds: float) -> None:
        """Collective: agree with rank 0 whether the checkpoint was saved, and whether a signal arrived meanwhile."""
        lost = self._check_directory() if problem is not None else None
        problem, lost, self._asked_to_stop = from_rank_0((problem, lost, THIS_RUN.asked_to_stop()))
        if lost is not None:
            self._end_run_without_directory(written, lost)
        if problem is not None:
            message = f"checkpoint {written.name} could not be saved to {self._directory}: {problem}; {_last_good()}"
            self._release()
            raise CheckpointError(f"{message}; {_once_fixed()}")
        THIS_RUN.newest = self._directory / written.name
        if written.manifest.finished:
            THIS_RUN.phase = RunPhase.SAVED
        say(f"checkpoint {THIS_RUN.newest} saved in {seconds:.1f} s")

    def _release(self) -> None:
        if dist.get_rank() == 0:
            self._claim.release()

    def _check_directory(self) -> str | None:
        """On rank 0: return the reason if the output directory no longer belongs to this run."""
        if dist.get_rank() == 0:
            try:
                self._claim.check()
            except store.NotOurs as lost:
                return str(lost)
        return None

    def _end_run_without_directory(self, written: Written, lost: str) -> NoReturn:
        """Raise on every rank, without naming an earlier checkpoint: it has moved, or belongs to another run."""
        self._release()
        THIS_RUN.newest = THIS_RUN.record_directory = None
        raise CheckpointError(f"checkpoint {written.name} is not saved: {self._directory} {lost}")


class BackgroundSave:
    """Saves in a thread during training, one at a time, on a separate process group."""

    def __init__(self, publish: Callable[[Written], None]) -> None:
        """Collective: create the group. `publish` is called on rank 0 after every rank has written its part."""
        self.group = gloo_group_aside()
        self.written: Written | None = None
        """The checkpoint of the current save, until `wait` returns."""
        self.seconds = 0.0
        self._publish = publish

    def start(self, folder: Path, copied: State, written: Written) -> None:
        """Collective: start to save `copied`, which training does not change."""
        began, ended = time.perf_counter(), Future[None]()

        def finish(saved: Future[object]) -> None:
            # The coordinator's future is done after the last rank has written, so rank 0 publishes all parts.
            failed: BaseException | None = None
            try:
                saved.result()
                if dist.get_rank() == 0:
                    self._publish(written)
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                failed = error
            self.seconds = time.perf_counter() - began
            ended.set_exception(failed)

        self.written, self._ended = written, ended
        # With several threads, torch reports errors of only one and would accept an incomplete checkpoint. Tensors on
        # the host need not be copied ahead.
        writer = FileSystemWriter(
            folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0, sync_files=True
        )
        future = async_save(copied, storage_writer=writer, process_group=self.group, async_stager=NoCopy())
        assert isinstance(future, Future)
        future.add_done_callback(finish)

    def wait(self) -> BaseException | None:
        """Wait for the end of the save; return its error."""
        error = self._ended.exception()
        self.written = None
        return error


class NoCopy(BlockingAsyncStager):
    """Stager for a state that was already copied to the host."""

    def stage(self, state_dict: State) -> State:
        """Return the state."""
        return state_dict


def copy_of(state: State) -> State:
    """Copy a state to the host, once; torch's stager makes two or three copies."""

    def copied(value: object) -> object:
        return copied_to_host(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    copies: State = tree_map(copied, state)
    return copies


def describe_failure(error: BaseException, directory: Path) -> str:
    """Return the cause of a failed save and its remedy."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    number, file = _errno_and_file(error)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "can't start new thread" in str(error):
        return f"out of memory on the host of rank {dist.get_rank()}: free host memory"
    if is_oom(error):
        return f"out of memory on rank {dist.get_rank()}: {' or '.join(KEYS[remedy] for remedy in REMEDIES)}"
    if isinstance(error, store.NotOurs):
        return str(error)
    if not directory.is_dir() or (isinstance(error, FileNotFoundError) and error.errno is None):
        return GONE
    if number is None:
        number = _errno_of_a_write(directory / store.SAVING)
    text = in_a_line(error) if number is None else os.strerror(number) + f": {file}" * bool(file)
    return f"{text} ({format_bytes(shutil.disk_usage(directory).free)} free)"


def _errno_and_file(error: BaseException | None) -> tuple[int | None, str | None]:
    """Return errno and file of the first OSError in a chain of exceptions."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno, error.filename
        error = error.__cause__ or error.__context__
    return None, None


def _errno_of_a_write(folder: Path) -> int | None:
    """Try a small write and return its errno, because torch's writer hides that of its own failure."""
    try:
        replace_file(folder / "try", bytes(SMALL_WRITE_BYTES))
        (folder / "try").unlink(missing_ok=True)
    except OSError as error:
        return error.errno
    return None


def out_of_memory_in(name: str, error: Exception) -> UnrecoverableError:
    """Return the error for running out of memory while gathering, which one rank cannot repeat alone."""
    return UnrecoverableError(
        f"out of memory while saving checkpoint {name} on rank {dist.get_rank()}; {_last_good()}; {_once_fixed()}",
        *REMEDIES,
    )


def _last_good() -> str:
    return f"the last good one is {THIS_RUN.newest}" if THIS_RUN.newest else "there is no earlier checkpoint"


def _once_fixed() -> str:
    again = "resume" if THIS_RUN.newest else "start over"
    return f"once that is fixed, {again} with the same command and resume_from_checkpoint=auto"
