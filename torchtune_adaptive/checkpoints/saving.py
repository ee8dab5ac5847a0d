"""Checkpoints of a run: saved so that a kill at any moment leaves the one before, and waited for where it ends."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import tree_map
from torchtune import training
from torchtune.utils import get_logger

from torchtune_adaptive.checkpoints import loading, store
from torchtune_adaptive.checkpoints.contents import (
    GATHERS_WITH_LESS,
    Checkpointer,
    Contents,
    RandomState,
    State,
    cause,
    gather_weights,
    make_ready,
    make_room_to_gather,
    restore_random_state,
    tried,
)
from torchtune_adaptive.checkpoints.identity import identity_of
from torchtune_adaptive.checkpoints.optimizer_state import AnyOptimizer, gather_state
from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.checkpoints.resuming import Start, checkpoint_directory
from torchtune_adaptive.checkpoints.store import Files, Manifest
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.memory import copied_to_host
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out
from torchtune_adaptive.engine.ranks import from_all_ranks, from_rank_0, gloo_group_aside
from torchtune_adaptive.errors import CheckpointError, NotLearningError, RunStopped, UnrecoverableError
from torchtune_adaptive.life.run_file import now
from torchtune_adaptive.life.this_run import THIS_RUN, Doing
from torchtune_adaptive.text import count_of

logger = logging.getLogger(__name__)


class Written(NamedTuple):
    """A checkpoint in the staging folder, complete but for its manifest and the random generators."""

    name: str
    manifest: Manifest
    random_states: list[RandomState]


class Checkpoints:
    """Writes and reads the checkpoints of one run, in torchtune's formats."""

    def __init__(
        self,
        settings: Settings,
        start: Start,
        contents: Contents,
        device: torch.device,
        build: Callable[[DictConfig, Path, Files | None], Checkpointer] = loading.build_checkpointer,
    ) -> None:
        """Collective: creates the group that checkpoints are saved on beside training. `build` makes what reads and
        writes the weights."""
        self._start = start
        self._contents = contents
        self._device = device
        self._directory = checkpoint_directory(settings).absolute()
        self._staging = self._directory / store.SAVING
        self._save_every = settings.save_every_n_steps
        self._keep_last = settings.keep_last_n_checkpoints
        self._serial = start.serial
        # What the command names is needed again if a launcher repeats it; `auto` goes on from the newest.
        named = start.files if settings.resume_from_checkpoint is True else None
        self._goes_back_to = named.folder.name if named else None
        self._checkpointer = build(settings.config, self._staging, start.files)
        # Only rank 0 writes it. The demo's checkpointer has just made the weights that belong to it.
        self._identity = identity_of(settings.config, contents.recipe) if dist.get_rank() == 0 else {}
        self._background = BackgroundSave(self._publish) if settings.enable_async_checkpointing else None
        self._draws_from = start.files.folder if start.files else None
        self._asked_to_stop = False
        self._warned_of_nan = False
        THIS_RUN.newest, THIS_RUN.newest_step = start.files.folder if start.files else None, start.step

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint: what a user goes on from when the run ends here."""
        return THIS_RUN.newest

    def make_room(self) -> None:
        """On rank 0: removes another run's checkpoints, once nothing but training itself can fail any more."""
        if self._start.overwrites and dist.get_rank() == 0:
            removed = count_of(self._start.overwrites, "checkpoint")
            logger.warning("overwrite_output_dir: %s in %s removed", removed, self._directory)
            store.remove_all(self._directory)

    def load(self) -> State:
        """Collective: the weights to start from; when resuming, the checkpoint's and its state."""
        return loading.load(self._checkpointer, self._start.files, self._contents.recipe)

    def resume(self, base: State, model: nn.Module, optimizer: AnyOptimizer) -> State:
        """Collective: the recipe state to go on with; a distributed checkpoint also fills model and optimizer."""
        files = self._start.files
        if files is None or not files.distributed:
            return base
        group = self._background.group if self._background else None
        return loading.load_distributed(files.folder, model, optimizer, group)

    @contextmanager
    def going_on_to_draw(self, progress: Progress) -> Iterator[None]:
        """Collective: around the beginning of an epoch, when the loader draws from the generators: in the middle of one
        that draw is behind us."""
        if not progress.steps_in_epoch:
            self._restore_random_state()
        yield
        self._restore_random_state()

    def _restore_random_state(self) -> None:
        """Collective: the first time, a resumed run's draws go on where the checkpoint's stopped."""
        if self._draws_from is None:
            return
        reason = restore_random_state(self._draws_from)
        self._draws_from = None
        if reason is not None and dist.get_rank() == 0:
            logger.info("random draws (dropout) restart from the seed: %s", reason)

    def due(self, progress: Progress, asked_to_stop: bool = False) -> bool:
        """Whether there is to be one here, within an epoch; where an epoch ends, there is one anyway."""
        every, sizes = self._save_every, progress.begun
        within = sizes is not None and progress.steps_in_epoch < sizes.steps
        return within and (asked_to_stop or (every is not None and progress.step % every == 0))

    def save(
        self, progress: Progress, model: nn.Module, optimizer: AnyOptimizer, loader_state: Mapping[str, object]
    ) -> None:
        """Collective: all that is needed to go on from here, under the name of the step or of the finished epoch."""
        if progress.finished:
            THIS_RUN.doing = Doing.LAST_SAVE
        self.wait()
        state = {**progress.recipe_state(), training.DATALOADER_KEY: dict(loader_state)}
        in_background = self._background is not None and not progress.finished
        name = progress.name_of_checkpoint(distributed=in_background)

        def prepare() -> State | None:
            if not in_background:
                # torchtune's state_dict() of a quantized model in one process is a copy of it in full precision
                if dist.get_world_size() > 1:
                    make_room_to_gather(self._contents.sharded(model), optimizer, self._device)
                return None
            if dist.get_rank() == 0:  # torch would create a folder that is gone anew, on whatever file system is left
                store.require_folder(self._staging)
            return copy_of({**state, training.MODEL_KEY: model.state_dict(), training.OPT_KEY: optimizer.state_dict()})

        copied, ready = make_ready(model, prepare, self._directory)
        written = Written(name, self._manifest(progress, distributed=in_background), ready.random_states)
        if not ready.finite:
            self._pass_over(name, last=progress.finished)
        elif ready.problem is not None:
            self._fail(written, ready.problem)
        elif self._background is not None and copied is not None:
            self._background.start(self._staging / name, copied, written)
        else:
            self._save_here(written, state, model, optimizer)

    def _save_here(self, written: Written, state: State, model: nn.Module, optimizer: AnyOptimizer) -> None:
        """Collective: returns once the checkpoint is there."""
        began = time.perf_counter()

        def gather() -> tuple[State, State]:
            return gather_state(model, optimizer, self._device), gather_weights(
                self._contents.sharded(model), self._device
            )

        if dist.get_world_size() == 1:
            gathered, problem = tried(gather, self._directory)
        else:
            with fatal_where_memory_runs_out(partial(out_of_memory_in, written.name)):
                gathered, problem = gather(), None
        if dist.get_rank() == 0 and gathered is not None:
            optimizer_part, weights = gathered

            def write() -> None:
                whole = {**self._contents.finished(weights, model), **state, training.OPT_KEY: optimizer_part}
                self._write(written, whole)

            _, problem = tried(write, self._directory)
        self._settle(written, problem, time.perf_counter() - began)

    def _write(self, written: Written, state: State) -> None:
        """On rank 0: through torchtune's checkpointer into the staging folder, then into place."""
        epoch = written.manifest.position.epochs
        store.require_folder(self._staging)
        options = {"adapter_only": True} if self._contents.adapter_only else {}
        talker = get_logger()
        level = talker.level
        talker.setLevel(logging.WARNING)  # its lines name the staging folder, where nothing stays
        try:
            self._checkpointer.save_checkpoint(state, epoch=epoch, intermediate_checkpoint=True, **options)
        finally:
            talker.setLevel(level)
        folder = self._staging / f"epoch_{epoch}"
        recipe_state = self._staging / store.RECIPE_STATE / store.RECIPE_STATE_FILE
        os.replace(recipe_state, folder / store.RECIPE_STATE_FILE)
        if folder.name != written.name:
            folder.rename(self._staging / written.name)
        self._publish(written)

    def _publish(self, written: Written) -> None:
        """On rank 0: makes a checkpoint of what lies written in the staging folder."""
        name, manifest, random_states = written
        staged = self._staging / name
        torch.save(random_states, staged / store.RANDOM_FILE)
        store.write_manifest(staged, dataclasses.replace(manifest, files=store.record_files(staged)))
        THIS_RUN.newest, THIS_RUN.newest_step = store.publish(self._directory, name), manifest.position.step
        try:
            store.tidy(self._directory, self._keep_last, self._goes_back_to)
        except OSError as error:  # the checkpoint itself is there
            logger.warning("older checkpoints in %s could not be removed: %s", self._directory, error.strerror)

    def _manifest(self, progress: Progress, *, distributed: bool) -> Manifest:
        self._serial += 1
        return Manifest(
            serial=self._serial - 1,
            position=progress.position,
            finished=progress.finished,
            distributed=distributed,
            ranks=dist.get_world_size(),
            identity=self._identity,
            saved_at=now(),
            files={},
        )

    def end_if_asked(self, progress: Progress, asked_to_stop: bool) -> None:
        """Collective: ends a run that is not over, after a save, if the ranks have agreed to."""
        if (asked_to_stop or self._asked_to_stop) and not progress.finished:
            self.wait()
            raise RunStopped(f"stopped after step {progress.step}{THIS_RUN.not_saved(progress.step)}")

    def wait(self) -> None:
        """Collective: waits for what is still being written, and tells all ranks how that went."""
        if self._background is None or (written := self._background.written) is None:
            return
        error = self._background.wait()
        problems = from_all_ranks(None if error is None else cause(error, self._directory))
        problem = next(filter(None, problems), None)
        self._settle(written, problem, self._background.seconds)

    def close(self) -> None:
        """Collective: finishes what is still being written."""
        self.wait()
        if dist.get_rank() == 0:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _settle(self, written: Written, problem: str | None, seconds: float) -> None:
        """Collective: rank 0 tells whether the checkpoint is there, and whether it was asked to stop in the meantime.

        So not one step more is trained.
        """
        problem, self._asked_to_stop = from_rank_0((problem, THIS_RUN.asked_to_stop()))
        if problem is not None:
            self._fail(written, problem)
            return
        self._warned_of_nan = False
        THIS_RUN.newest, THIS_RUN.newest_step = self._directory / written.name, written.manifest.position.step
        if dist.get_rank() == 0:
            logger.info("checkpoint %s saved in %.1f s", THIS_RUN.newest, seconds)

    def _fail(self, written: Written, problem: str) -> NoReturn:
        """On every rank: ends the run."""
        message = f"checkpoint {written.name} could not be saved to {self._directory}: {problem}; {_last_good()}"
        if dist.get_rank() == 0:
            store.discard_staged(self._directory)
        raise CheckpointError(f"{message}; {_once_mended()}")

    def _pass_over(self, name: str, *, last: bool) -> None:
        """On every rank: weights that are NaN would only push out those that are not."""
        fact = f"checkpoint {name} is not saved, because the weights are NaN or infinite; {_last_good()}"
        if last:
            raise NotLearningError(
                f"{fact}: start a new run with a lower optimizer.lr or a clip_grad_norm, from the weights of that "
                "checkpoint if there is one"
            )
        if not self._warned_of_nan and dist.get_rank() == 0:
            logger.warning("%s; no checkpoint is saved until they are finite", fact)
        self._warned_of_nan = True


class BackgroundSave:
    """A save beside training: torch.distributed.checkpoint writes a copy of the state in a thread, one save at a time.

    Its collectives have a group of their own, where they cannot meet training's.
    """

    def __init__(self, publish: Callable[[Written], None]) -> None:
        """Collective: creates the group. `publish` is called on rank 0, once every rank has written its part."""
        self.group = gloo_group_aside()
        self.written: Written | None = None
        """The checkpoint that is being written, or was and has not been waited for."""
        self.seconds = 0.0
        self._publish = publish
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def start(self, folder: Path, copied: State, written: Written) -> None:
        """Collective: returns at once. What is `copied` no longer changes with training."""
        self.written, self._error = written, None
        self._ended.clear()
        began = time.perf_counter()
        # One thread, and so one file: of several, torch hears of errors in one alone, and takes a checkpoint that lacks
        # the others' parts for a whole one. What is on the host need not be copied ahead.
        writer = FileSystemWriter(
            folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0, sync_files=True
        )
        future = async_save(copied, storage_writer=writer, process_group=self.group, async_stager=Copied())
        assert isinstance(future, Future)
        future.add_done_callback(partial(self._finish, written, began))

    def wait(self) -> BaseException | None:
        """Waits for the save, and returns what went wrong on this rank."""
        self._ended.wait()
        self.written = None
        return self._error

    def _finish(self, written: Written, began: float, future: Future[object]) -> None:
        # The coordinator's future is done after the last rank has written, so what rank 0 publishes is whole.
        try:
            future.result()
            if dist.get_rank() == 0:
                self._publish(written)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - a thread has nobody to raise to but `wait`
            self._error = error
        finally:
            self.seconds = time.perf_counter() - began
            self._ended.set()


class Copied(BlockingAsyncStager):
    """Copying again would let training stand still for nothing."""

    def stage(self, state_dict: State) -> State:
        return state_dict


def copy_of(state: State) -> State:
    """One copy on the host, in the place of the two or three of torch's own stager."""

    def copied(value: object) -> object:
        return copied_to_host(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    copies: State = tree_map(copied, state)
    return copies


def out_of_memory_in(name: str, error: Exception) -> UnrecoverableError:
    """Names the checkpoint if gathering it runs out of memory, which no rank can repeat alone."""
    return UnrecoverableError(
        f"out of memory while saving checkpoint {name} on rank {dist.get_rank()}; {_last_good()}; {_once_mended()}",
        *GATHERS_WITH_LESS,
    )


def _last_good() -> str:
    return f"the last good one is {THIS_RUN.newest}" if _is_there() else "there is no earlier checkpoint"


def _once_mended() -> str:
    again = "resume" if _is_there() else "start over"
    return f"once that is fixed, {again} with the same command and resume_from_checkpoint=auto"


def _is_there() -> bool:
    return THIS_RUN.newest is not None and THIS_RUN.newest.is_dir()
