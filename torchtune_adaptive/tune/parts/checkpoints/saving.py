"""Checkpoints of a run: saved so that a kill at any moment leaves the one before, loaded without guessing."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torchtune import training

from torchtune_adaptive.errors import CheckpointError, NotLearningError, RunStopped, UnrecoverableError
from torchtune_adaptive.memory.device import is_oom
from torchtune_adaptive.tune.parts.checkpoints import folders, loading, problems
from torchtune_adaptive.tune.parts.checkpoints.background import BackgroundSave, Finished
from torchtune_adaptive.tune.parts.checkpoints.contents import Contents, State, weights_are_finite
from torchtune_adaptive.tune.parts.checkpoints.identity import identity_of, told_values
from torchtune_adaptive.tune.parts.checkpoints.manifest import Manifest, record_files, write_manifest
from torchtune_adaptive.tune.parts.checkpoints.progress import Progress
from torchtune_adaptive.tune.parts.checkpoints.random_state import (
    RandomState,
    gather_random_state,
    restore_random_state,
    write_random_state,
)
from torchtune_adaptive.tune.parts.checkpoints.sources import Files
from torchtune_adaptive.tune.parts.checkpoints.start import Start, checkpoint_directory
from torchtune_adaptive.tune.parts.optimization.state import gather_state
from torchtune_adaptive.tune.start.settings import Settings
from torchtune_adaptive.tune.start.this_run import THIS_RUN, Doing
from torchtune_adaptive.wording import count_of

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_GOES_ON = "once that is mended the same command with resume_from_checkpoint=auto goes on"


class Checkpoints:
    """Writes and reads the checkpoints of one run, in torchtune's formats."""

    def __init__(
        self,
        settings: Settings,
        start: Start,
        contents: Contents,
        device: torch.device,
        *,
        stops_on_error: bool,
        build: Callable[[DictConfig, Path, Files | None], Any] = loading.build_checkpointer,
    ) -> None:
        """Collective: creates the group that checkpoints are saved on beside training. `build` makes what reads and
        writes the weights."""
        self._start = start
        self._contents = contents
        self._device = device
        self._stops_on_error = stops_on_error
        self._directory = checkpoint_directory(settings).absolute()
        self._save_every = settings.save_every_n_steps
        self._keep_last = settings.keep_last_n_checkpoints
        self._serial = start.serial
        self._worth_saving = True  # as the last save has found the weights
        self._resumed_from = start.files.folder.name if start.files else None
        self._checkpointer = build(settings.config, self._directory / folders.SAVING, start.files)
        # the demo's checkpointer makes the weights that belong to the identity
        self._identity, self._told = identity_of(settings.config, contents.recipe), told_values(settings.config)
        self._background = BackgroundSave(self._publish) if settings.enable_async_checkpointing else None
        self._draws_from = start.files.folder if start.files else None
        self._asked_to_stop = False
        self._step = start.step  # of the newest checkpoint, or of the one that is being saved
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
            folders.remove_all(self._directory)

    def load(self) -> State:
        """Collective: the weights to start from; when resuming, the checkpoint's and its state."""
        return loading.load(self._checkpointer, self._start.files, self._contents.recipe)

    def resume(self, base: State, model: nn.Module, optimizer: Any) -> State:
        """Collective: the recipe state to go on with; a distributed checkpoint also fills model and optimizer."""
        files = self._start.files
        if files is None or not files.distributed:
            return base
        group = self._background.group if self._background else None
        return loading.load_distributed(files.folder, model, optimizer, group)

    def restore_random_state(self) -> None:
        """Collective: the first time, a resumed run's draws go on where the checkpoint's stopped."""
        if self._draws_from is None:
            return
        reason = restore_random_state(self._draws_from)
        self._draws_from = None
        if reason is not None and dist.get_rank() == 0:
            logger.info("random draws (dropout) begin anew from the seed: %s", reason)

    def due(self, progress: Progress, asked_to_stop: bool = False) -> bool:
        """Whether there is to be one here, within an epoch; where an epoch ends, there is one anyway."""
        every, sizes = self._save_every, progress.begun
        within = sizes is not None and progress.steps_in_epoch < sizes.steps
        return within and (asked_to_stop or (every is not None and progress.step % every == 0))

    def save(self, progress: Progress, model: nn.Module, optimizer: Any, loader_state: Mapping[str, Any]) -> None:
        """Collective: all that is needed to go on from here, under the name of the step or of the finished epoch."""
        if progress.finished:
            THIS_RUN.doing = Doing.LAST_SAVE
        self._settle_background()
        self._step = progress.step
        state = {**progress.recipe_state(), training.DATALOADER_KEY: dict(loader_state)}
        in_background = self._background is not None and not progress.finished
        name = progress.name_of_checkpoint(distributed=in_background)
        if not weights_are_finite(model):
            self._pass_over(name, last=progress.finished)
            return
        self._worth_saving = True
        if in_background:
            self._save_in_background(name, progress, state, model, optimizer)
        else:
            self._save_here(name, progress, state, model, optimizer)

    def _save_here(self, name: str, progress: Progress, state: State, model: nn.Module, optimizer: Any) -> None:
        """Collective: returns once the checkpoint is there."""
        began, problem = time.perf_counter(), None
        with self._naming(name):
            random_states = gather_random_state()
            manifest = self._manifest(progress, distributed=False)
            optimizer_part = {training.OPT_KEY: gather_state(model, optimizer, self._device)}
            weights = self._contents.weights(model, self._device)
        if dist.get_rank() == 0:
            problem = self._write(name, {**weights, **state, **optimizer_part}, manifest, random_states or [])
        self._settle(name, problem, time.perf_counter() - began, last=progress.finished)

    def _save_in_background(
        self, name: str, progress: Progress, state: State, model: nn.Module, optimizer: Any
    ) -> None:
        """Collective: returns once the state is copied, so that training may change it."""
        assert self._background is not None
        # torch would create a folder that is gone anew, on whatever file system is left.
        if gone := _from_rank_0(None if self._staged(name).parent.is_dir() else "the folder is gone"):
            self._fail(name, gone, last=False)
            return
        with self._naming(name):
            random_states = gather_random_state()
            manifest = self._manifest(progress, distributed=True)
            everything = {**state, training.MODEL_KEY: model.state_dict(), training.OPT_KEY: optimizer.state_dict()}
            self._background.start(self._staged(name), everything, (name, manifest, random_states or []))

    def end_if_asked(self, progress: Progress, asked_to_stop: bool) -> None:
        """Collective: ends a run that is not over, after a save, if the ranks have agreed to."""
        if (asked_to_stop or self._asked_to_stop) and not progress.finished:
            self._settle_background()
            raise RunStopped(f"stopped after step {progress.step}{THIS_RUN.not_saved(progress.step)}")

    def close(self) -> None:
        """Collective: finishes what is still being written."""
        self._settle_background()
        if dist.get_rank() == 0:
            shutil.rmtree(self._directory / folders.SAVING, ignore_errors=True)

    def _write(self, name: str, state: State, manifest: Manifest, random_states: list[RandomState]) -> str | None:
        """On rank 0: through torchtune's checkpointer into the staging folder, then into place. What went wrong."""
        staging = self._directory / folders.SAVING
        epoch = manifest.position.epochs
        try:
            problems.require_folder(staging)
            options = {"adapter_only": True} if self._contents.adapter_only else {}
            with problems.quiet_torchtune():
                self._checkpointer.save_checkpoint(state, epoch=epoch, intermediate_checkpoint=True, **options)
            written = staging / f"epoch_{epoch}"
            os.replace(staging / folders.RECIPE_STATE / folders.RECIPE_STATE_FILE, written / folders.RECIPE_STATE_FILE)
            if written != self._staged(name):
                written.rename(self._staged(name))
            self._publish((name, manifest, random_states))
        except Exception as error:  # noqa: BLE001 - whatever a checkpointer or a file system can raise: all ranks hear of it
            return problems.cause(error, self._directory)
        return None

    def _publish(self, finished: Finished) -> None:
        """On rank 0: makes a checkpoint of what lies written in the staging folder."""
        name, manifest, random_states = finished
        staged = self._staged(name)
        write_random_state(staged, random_states)
        files = record_files(staged)
        write_manifest(staged, dataclasses.replace(manifest, files=files))
        folders.publish(self._directory, name)
        try:
            folders.tidy(self._directory, self._keep_last, self._resumed_from)
        except OSError as error:  # the checkpoint itself is there
            logger.warning("links or older checkpoints in %s are as they were: %s", self._directory, error.strerror)

    def _staged(self, name: str) -> Path:
        return self._directory / folders.SAVING / name

    def _manifest(self, progress: Progress, *, distributed: bool) -> Manifest:
        self._serial += 1
        return Manifest(
            run=self._start.run,
            serial=self._serial - 1,
            position=progress.position,
            finished=progress.finished,
            distributed=distributed,
            ranks=dist.get_world_size(),
            identity=self._identity,
            versions=problems.versions(),
            saved_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            files={},
            told=self._told,
        )

    def _settle_background(self) -> None:
        """Collective: waits for what is still being written, and tells all ranks how that went."""
        if self._background is None or (name := self._background.name) is None:
            return
        mine = self._background.wait()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if mine is None else problems.cause(mine, self._directory))
        problem = next((each for each in told if each is not None), None)
        self._settle(name, problem, self._background.seconds)

    def _settle(self, name: str, problem: str | None, seconds: float, *, last: bool = False) -> None:
        """Collective: rank 0 tells whether the checkpoint is there, and whether it was asked to stop in the meantime.

        So not one step more is trained.
        """
        told, self._asked_to_stop = _from_rank_0((problem, THIS_RUN.asked_to_stop()))
        if told is not None:
            self._fail(name, told, last=last)
            return
        THIS_RUN.newest, THIS_RUN.newest_step = self._directory / name, self._step
        if dist.get_rank() == 0:
            logger.info("checkpoint %s saved in %.1f s", self.last, seconds)

    def _fail(self, name: str, problem: str, *, last: bool) -> None:
        """On every rank: training goes on if the config says so, but a run without its last checkpoint has failed."""
        message = f"checkpoint {name} could not be saved to {self._directory}: {problem}; {self._last_good()}"
        if dist.get_rank() == 0:
            folders.discard_staged(self._directory)
        if self._stops_on_error:
            raise CheckpointError(
                f"{message}; {_GOES_ON} (adaptive.on_save_error: continue would have trained on without it)"
            )
        if last:
            raise CheckpointError(f"{message}; {_GOES_ON}")
        if dist.get_rank() == 0:
            logger.warning("%s; training goes on (adaptive.on_save_error: continue)", message)

    def _pass_over(self, name: str, *, last: bool) -> None:
        """On every rank: weights that are NaN would only push out those that are not."""
        fact = f"checkpoint {name} is not saved, since the weights are NaN or infinite; {self._last_good()}"
        if last:
            raise NotLearningError(f"{fact}: start again from there with a lower optimizer.lr or a clip_grad_norm")
        if self._worth_saving and dist.get_rank() == 0:
            logger.warning("%s; nor is any that follows, as long as they are", fact)
        self._worth_saving = False

    def _last_good(self) -> str:
        if self.last is None or not self.last.is_dir():
            return "there is no earlier checkpoint"
        return f"the last good one is {self.last}"

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Names the checkpoint if gathering it runs out of memory, which no rank can repeat alone."""
        try:
            yield
        except Exception as error:
            if not is_oom(error):
                raise
            raise UnrecoverableError(
                f"out of memory while saving checkpoint {name} on rank {dist.get_rank()}; {self._last_good()}: go on "
                "from there with resume_from_checkpoint=auto and a smaller batch_size or adaptive.max_batch_size"
            ) from error


def _from_rank_0(value: Value) -> Value:
    """Collective: rank 0's value, on every rank."""
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]
