"""Where a run starts: anew, or from which checkpoint. Rank 0 looks and decides; the others are told.

resume_from_checkpoint: False    anew, in an output directory without checkpoints
                        auto     the newest complete checkpoint of this run, or anew where there is none
                        True     as torchtune has it: from the files that the config names
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist
from omegaconf import DictConfig

from torchtune_adaptive.checkpoints import folders
from torchtune_adaptive.checkpoints.folders import FoundCheckpoint
from torchtune_adaptive.checkpoints.identity import difference, identity_of
from torchtune_adaptive.checkpoints.manifest import Manifest
from torchtune_adaptive.checkpoints.named import named_files
from torchtune_adaptive.checkpoints.overwriting import check_fresh_start
from torchtune_adaptive.checkpoints.sources import Files, files_of
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import AUTO, Settings
from torchtune_adaptive.engine.ranks import from_all_ranks, from_rank_0
from torchtune_adaptive.errors import AdaptiveError, ConfigError, RunFinished
from torchtune_adaptive.life import run_file
from torchtune_adaptive.life.output_lock import Lock, take, unwritable
from torchtune_adaptive.life.started_by import command_to_go_on, this_launcher
from torchtune_adaptive.life.this_run import THIS_RUN, was_restarted
from torchtune_adaptive.rehearsal import REHEARSAL

logger = logging.getLogger(__name__)

StepsOnRanks: TypeAlias = Callable[[int], int]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts: the same on all ranks."""

    run: str
    """The id of the run: a new one, or that of the run that goes on."""
    serial: int
    """The serial of its next checkpoint."""
    files: Files | None = None
    """The checkpoint to go on from; None for a fresh start."""
    step: int = 0
    """The last one that is in it, where it says so."""
    locks: tuple[Lock, ...] = ()
    """Locks that keep other runs out until this one is over; held by rank 0."""

    overwrites: int = 0
    """Checkpoints of another run in the output directory, to be removed once training can begin."""
    mark: str = ""
    """The name of a file in the staging folder, by which ranks know whether they see that of rank 0."""

    @property
    def resumes(self) -> bool:
        return self.files is not None

    def release(self) -> None:
        """Lets other runs in, once this one writes nothing more."""
        for lock in self.locks:
            lock.release()


def find_start(settings: Settings, recipe: str, *, steps: StepsOnRanks | None = None) -> Start:
    """Collective: the decision, which raises `RunFinished` or the same error on every rank.

    `steps` says how many the whole run has on so many ranks, where it counts them and not epochs.
    """
    decided: Start | Exception | None = None
    locks: list[Lock] = []
    launchers = sorted({each for each in from_all_ranks(this_launcher()) if each is not None})
    if dist.get_rank() == 0:
        try:
            THIS_RUN.relaunched = _has_begun_under(launchers, settings)
            locks.extend(map(take, places_of(settings)))
            decided = decide(settings, recipe, steps)
        except (AdaptiveError, RunFinished) as error:
            decided = error
            for lock in locks:
                lock.release()
    start = from_rank_0(decided)
    if isinstance(start, Exception):
        raise start
    assert start is not None, "rank 0 has decided"
    _check_shared(start, settings)
    _note(start, settings, launchers)
    return replace(start, locks=tuple(locks))


def places_of(settings: Settings) -> list[Path]:
    """Where a run writes: its checkpoints, and its record where that is elsewhere."""
    places = checkpoint_directory(settings).absolute(), Path(settings.output_dir).absolute()
    return list(dict.fromkeys(places))


def _has_begun_under(launchers: Sequence[str], settings: Settings) -> bool:
    """Whether one of these launchers has started a run here before: it is this one then."""
    before = filter(None, map(run_file.read, places_of(settings)))
    return any(each in run.launchers for run in before for each in launchers)


def _note(start: Start, settings: Settings, launchers: list[str]) -> None:
    """Leaves a note for whoever will start the run again; every rank may be the one that tells of its end."""
    if REHEARSAL.on:
        return
    THIS_RUN.places = tuple(places_of(settings))
    if dist.get_rank() == 0:
        for place in THIS_RUN.places:
            before = run_file.read(place) if was_restarted() else None
            serial = before.serial if before else start.serial
            run_file.begin(place, command_to_go_on(), checkpoint_directory(settings), serial, launchers)


def checkpoint_directory(settings: Settings) -> Path:
    section = components.require(settings.config, "checkpointer")
    return Path(section.get("output_dir", None) or settings.output_dir)


def decide(settings: Settings, recipe: str, steps: StepsOnRanks | None = None) -> Start:
    """On rank 0: looks at the output directory, and prepares it for what the run will write."""
    directory = checkpoint_directory(settings)
    check_names_are_free(directory)
    found = folders.find_checkpoints(directory)
    serial = 1 + max((each.manifest.serial for each in found if each.manifest), default=-1)
    mode = settings.resume_from_checkpoint
    own = found if mode == AUTO else _saved_before_the_restart(found, settings, directory)
    chosen = _newest(own, settings, recipe, directory, steps) if mode == AUTO or own else None
    files: Files | None = None
    manifest: Manifest | None = None
    if chosen is not None and chosen.manifest is not None:
        files, manifest = files_of(chosen.path, chosen.manifest), chosen.manifest
    elif mode is True:
        files, manifest = named_files(
            settings.config, recipe, asynchronous=settings.enable_async_checkpointing, directory=directory, found=found
        )
        _check_rest_of_epoch(settings.config, recipe, manifest)
    else:
        check_fresh_start(found, settings, directory, recipe)
    if files is not None:
        logger.info("resuming from %s%s", files.folder, f" ({manifest.position})" if manifest else "")
    return Start(
        run=manifest.run if manifest else uuid.uuid4().hex[:12],
        serial=serial,
        files=files,
        step=manifest.position.step if manifest else 0,
        overwrites=len(found) if files is None else 0,
        mark=_prepare(directory),
    )


def _saved_before_the_restart(
    found: Sequence[FoundCheckpoint], settings: Settings, directory: Path
) -> list[FoundCheckpoint]:
    """Checkpoints of this run since it was told where to start: a launcher that restarts it repeats the command, and a
    run that always went back to the same place might never get past it."""
    begun = run_file.read(directory)
    if settings.resume_from_checkpoint is not True or begun is None or not was_restarted():
        return []
    return [each for each in found if each.manifest and each.manifest.serial >= begun.serial]


def _newest(
    found: Sequence[FoundCheckpoint], settings: Settings, recipe: str, directory: Path, steps: StepsOnRanks | None
) -> FoundCheckpoint | None:
    """The newest intact checkpoint, if it is one of this run."""
    chosen, passed_over = folders.newest_intact(found)
    for each in passed_over:
        logger.warning("skipped: %s %s", each.path, each.fault)
    if chosen is None or chosen.manifest is None:
        if not found:
            logger.info("fresh start: %s contains no checkpoint yet", directory)
        return None
    check_same_run(chosen.manifest, settings.config, recipe, directory)
    _check_unfinished(chosen, chosen.manifest, settings, steps)
    return chosen


def check_same_run(saved: Manifest, cfg: DictConfig, recipe: str, directory: Path) -> None:
    """Refuses to go on with the checkpoint of another run."""
    changed = difference(identity_of(cfg, recipe), saved.identity)
    if changed is not None:
        raise ConfigError(
            f"cannot resume (resume_from_checkpoint is auto): {changed} in the run whose checkpoints are in "
            f"{directory}; set it back, or start a new run, either with another output_dir or with "
            "resume_from_checkpoint: False and overwrite_output_dir: True"
        )


def _check_rest_of_epoch(cfg: DictConfig, recipe: str, manifest: Manifest | None) -> None:
    """Refuses, in mid-epoch, a changed order or size of steps: it would repeat samples and miss others."""
    if manifest is None or not manifest.position.steps_in_epoch:
        return
    changed = difference(identity_of(cfg, recipe), manifest.identity)
    if changed is not None:
        raise ConfigError(
            f"cannot resume in the middle of an epoch (resume_from_checkpoint is True): {changed} when the checkpoint "
            "was saved; set it back, or resume from the end of an epoch"
        )


def _check_unfinished(
    chosen: FoundCheckpoint, manifest: Manifest, settings: Settings, steps: StepsOnRanks | None
) -> None:
    position = manifest.position
    # by the ranks that it had: on others a step has other samples, and what is half done would look finished
    if position.epochs >= settings.epochs if steps is None else position.step >= steps(manifest.ranks):
        _finish_cleaning(chosen.path.parent, settings)
        more = f"set epochs above {position.epochs}" if steps is None else "raise num_steps"
        raise RunFinished(
            f"nothing left to train: the run is finished, and its last checkpoint is {chosen.path} ({position}); "
            f"{more} to continue from there"
        )


def _finish_cleaning(directory: Path, settings: Settings) -> None:
    """Sets the links and prunes, which a kill right after the last checkpoint has prevented."""
    if not folders.leftovers(directory):
        return
    with suppress(OSError):  # the run is finished all the same
        folders.tidy(directory, settings.keep_last_n_checkpoints, resumed_from=None)
        folders.clean(directory)  # last: where this is killed too, what is left over says that there is more to do


def check_names_are_free(directory: Path) -> None:
    if file := next((path for path in folders.named(directory) if not path.is_dir() and path.exists()), None):
        raise ConfigError(f"{str(file)!r} is a file, but has the name of a checkpoint: move it, or change output_dir")


def _prepare(directory: Path) -> str:
    """Prepares the folder for checkpoints, and leaves a mark where they are staged; what is wrong with it shows now and
    not at the first save."""
    mark = uuid.uuid4().hex
    try:
        directory.mkdir(parents=True, exist_ok=True)
        folders.clean(directory)
        (directory / folders.SAVING).mkdir()
        (directory / folders.SAVING / mark).touch()
    except OSError as error:
        raise unwritable(directory, error) from error
    return mark


def _check_shared(start: Start, settings: Settings) -> None:
    """Collective: a checkpoint that only one node has is lost to the others, and to the run that goes on elsewhere."""
    directory = checkpoint_directory(settings)
    # the folder alone would not tell: on a disk of its own, a rank may have one of an earlier run
    seen = from_all_ranks((directory / folders.SAVING / start.mark).exists())
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if not blind:
        return
    message = f"output_dir {str(directory)!r} is not shared by all nodes: rank {blind[0]} does not see rank 0's"
    if settings.resume_from_checkpoint is not False or settings.enable_async_checkpointing:
        raise ConfigError(f"{message}; put it on a file system that all nodes mount")
    if dist.get_rank() == 0:
        logger.warning("%s; checkpoints are only on rank 0's node", message)
