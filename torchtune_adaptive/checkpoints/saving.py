"""Checkpoints of a run: saved so that a kill at any moment leaves the one before, loaded without guessing."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torchtune import training
from torchtune.utils import get_logger

from torchtune_adaptive.checkpoints import folders, loading, outcomes, problems
from torchtune_adaptive.checkpoints.background import BackgroundSave, Finished, copy_of
from torchtune_adaptive.checkpoints.contents import (
    Checkpointer,
    Contents,
    Ready,
    State,
    gather_weights,
    make_ready,
    make_room_to_gather,
)
from torchtune_adaptive.checkpoints.identity import identity_of
from torchtune_adaptive.checkpoints.manifest import Manifest, record_files, versions, write_manifest
from torchtune_adaptive.checkpoints.optimizer_state import AnyOptimizer, gather_state
from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.checkpoints.random_state import (
    RandomState,
    restore_random_state,
    write_random_state,
)
from torchtune_adaptive.checkpoints.resuming import Start, checkpoint_directory
from torchtune_adaptive.checkpoints.sources import Files
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.ranks import from_all_ranks, from_rank_0
from torchtune_adaptive.errors import RunStopped
from torchtune_adaptive.life.run_file import now
from torchtune_adaptive.life.this_run import THIS_RUN, Doing
from torchtune_adaptive.text import count_of

logger = logging.getLogger(__name__)


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
        stops_on_error = settings.adaptive.on_save_error == "stop"
        self._outcomes = outcomes.Outcomes(self._directory, stops_on_error=stops_on_error)
        self._save_every = settings.save_every_n_steps
        self._keep_last = settings.keep_last_n_checkpoints
        self._serial = start.serial
        self._resumed_from = start.files.folder.name if start.files else None
        self._checkpointer = build(settings.config, self._directory / folders.SAVING, start.files)
        # the demo's checkpointer makes the weights that belong to the identity
        self._identity = identity_of(settings.config, contents.recipe)
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
        self._step = progress.step
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
                folders.require_folder(self._staged(name).parent)
            return copy_of({**state, training.MODEL_KEY: model.state_dict(), training.OPT_KEY: optimizer.state_dict()})

        copied, ready = make_ready(model, prepare, self._directory)
        if not ready.finite:
            self._outcomes.pass_over(name, last=progress.finished)
        elif ready.problem is not None:
            self._outcomes.failed(name, ready.problem, last=progress.finished)
        elif self._background is not None and copied is not None:
            manifest = self._manifest(progress, distributed=True)
            self._background.start(self._staged(name), copied, (name, manifest, ready.random_states))
        else:
            self._save_here(name, progress, state, ready, model, optimizer)

    def _save_here(
        self, name: str, progress: Progress, state: State, ready: Ready, model: nn.Module, optimizer: AnyOptimizer
    ) -> None:
        """Collective: returns once the checkpoint is there."""
        began = time.perf_counter()
        manifest = self._manifest(progress, distributed=False)
        gathered, problem = self._gathered(name, model, optimizer)
        if dist.get_rank() == 0 and gathered is not None:
            optimizer_part, weights = gathered

            def write() -> None:
                whole = {**self._contents.finished(weights, model), **state, training.OPT_KEY: optimizer_part}
                self._write(name, whole, manifest, ready.random_states)

            _, problem = problems.tried(write, self._directory)
        self._settle(name, problem, time.perf_counter() - began, last=progress.finished)

    def _gathered(
        self, name: str, model: nn.Module, optimizer: AnyOptimizer
    ) -> tuple[tuple[State, State] | None, str | None]:
        """Collective: optimizer state and weights; or, of a rank that has no peers, what went wrong."""

        def gather() -> tuple[State, State]:
            optimizer_part = gather_state(model, optimizer, self._device)
            return optimizer_part, gather_weights(self._contents.sharded(model), self._device)

        if dist.get_world_size() == 1:
            return problems.tried(gather, self._directory)
        with outcomes.naming(name):
            return gather(), None

    def end_if_asked(self, progress: Progress, asked_to_stop: bool) -> None:
        """Collective: ends a run that is not over, after a save, if the ranks have agreed to."""
        if (asked_to_stop or self._asked_to_stop) and not progress.finished:
            self.wait()
            raise RunStopped(f"stopped after step {progress.step}{THIS_RUN.not_saved(progress.step)}")

    def wait(self) -> None:
        """Collective: waits for what is still being written, and tells all ranks how that went."""
        if self._background is None or (name := self._background.name) is None:
            return
        mine = self._background.wait()
        told = from_all_ranks(None if mine is None else problems.cause(mine, self._directory))
        problem = next((each for each in told if each is not None), None)
        self._settle(name, problem, self._background.seconds)

    def close(self) -> None:
        """Collective: finishes what is still being written."""
        self.wait()
        if dist.get_rank() == 0:
            shutil.rmtree(self._directory / folders.SAVING, ignore_errors=True)

    def _write(self, name: str, state: State, manifest: Manifest, random_states: list[RandomState]) -> None:
        """On rank 0: through torchtune's checkpointer into the staging folder, then into place."""
        staging = self._directory / folders.SAVING
        epoch = manifest.position.epochs
        folders.require_folder(staging)
        options = {"adapter_only": True} if self._contents.adapter_only else {}
        with _quiet_torchtune():
            self._checkpointer.save_checkpoint(state, epoch=epoch, intermediate_checkpoint=True, **options)
        written = staging / f"epoch_{epoch}"
        os.replace(staging / folders.RECIPE_STATE / folders.RECIPE_STATE_FILE, written / folders.RECIPE_STATE_FILE)
        if written != self._staged(name):
            written.rename(self._staged(name))
        self._publish((name, manifest, random_states))

    def _publish(self, finished: Finished) -> None:
        """On rank 0: makes a checkpoint of what lies written in the staging folder."""
        name, manifest, random_states = finished
        staged = self._staged(name)
        write_random_state(staged, random_states)
        files = record_files(staged)
        write_manifest(staged, dataclasses.replace(manifest, files=files))
        THIS_RUN.newest, THIS_RUN.newest_step = folders.publish(self._directory, name), manifest.position.step
        try:
            folders.tidy(self._directory, self._keep_last, self._resumed_from)
        except OSError as error:  # the checkpoint itself is there
            logger.warning("links or older checkpoints in %s could not be updated: %s", self._directory, error.strerror)

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
            versions=versions(),
            saved_at=now(),
            files={},
        )

    def _settle(self, name: str, problem: str | None, seconds: float, *, last: bool = False) -> None:
        """Collective: rank 0 tells whether the checkpoint is there, and whether it was asked to stop in the meantime.

        So not one step more is trained.
        """
        told, self._asked_to_stop = from_rank_0((problem, THIS_RUN.asked_to_stop()))
        if told is None:
            self._outcomes.saved(name, self._step, seconds)
        else:
            self._outcomes.failed(name, told, last=last)


@contextmanager
def _quiet_torchtune() -> Iterator[None]:
    """Silences torchtune's lines, which name the staging folder, where nothing stays."""
    talker = get_logger()
    level = talker.level
    talker.setLevel(logging.WARNING)
    try:
        yield
    finally:
        talker.setLevel(level)
