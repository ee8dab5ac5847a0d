"""Where a run starts: anew, or from which checkpoint. Rank 0 looks and decides; the others are told.

resume_from_checkpoint: False    anew, in an output directory without checkpoints, or with overwrite_output_dir
                        auto     the newest complete checkpoint of this run, or anew where there is none
                        True     as torchtune has it: from the files that the config names
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeAlias

import torch.distributed as dist
from omegaconf import DictConfig, ListConfig

from torchtune_adaptive.checkpoints import store
from torchtune_adaptive.checkpoints.identity import difference, file_names, identity_of, saves_adapters
from torchtune_adaptive.checkpoints.store import Claim, Files, FoundCheckpoint, Manifest
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import AUTO, Settings
from torchtune_adaptive.engine.ranks import from_all_ranks, from_rank_0
from torchtune_adaptive.errors import AdaptiveError, ConfigError, RunFinished
from torchtune_adaptive.lifecycle import run_state
from torchtune_adaptive.lifecycle.run_state import RESTARTS, THIS_RUN, lock_directory, resume_command, unwritable
from torchtune_adaptive.lifecycle.torchrun import this_launcher
from torchtune_adaptive.rehearsal_flag import REHEARSAL

logger = logging.getLogger(__name__)

StepsOnRanks: TypeAlias = Callable[[int], int]

DISTRIBUTED_METADATA = ".metadata"
"""The last file that torch.distributed.checkpoint writes."""


@dataclass(frozen=True, kw_only=True)
class Start:
    serial: int
    """The serial of its next checkpoint."""
    files: Files | None = None
    """The checkpoint to go on from; None for a fresh start."""
    locks: tuple[IO[bytes], ...] = ()
    """What keeps other runs out until it is closed; held by rank 0."""
    overwrites: int = 0
    """Checkpoints of another run in the output directory, to be removed once training can begin."""
    claim: Claim
    """The hold on the directory of checkpoints; by its mark, ranks know whether they see that of rank 0."""

    @property
    def resumes(self) -> bool:
        return self.files is not None

    def release(self) -> None:
        """Lets other runs in, once this one writes nothing more."""
        for lock in self.locks:
            lock.close()


def find_start(settings: Settings, recipe: str, *, steps: StepsOnRanks | None = None) -> Start:
    """Collective: the decision, which raises `RunFinished` or the same error on every rank. `steps` says how many the
    whole run has on so many ranks, where it counts them and not epochs."""
    decided: Start | Exception | None = None
    locks: list[IO[bytes]] = []
    launchers = sorted(set(filter(None, from_all_ranks(this_launcher()))))
    if dist.get_rank() == 0:
        before = run_state.read_record(Path(settings.output_dir))
        # each launcher counts its own restarts, and not those for which another node has asked
        again = before is not None and not set(launchers).isdisjoint(before.launchers)
        THIS_RUN.restarted = again or os.environ.get(RESTARTS, "0") != "0"
        try:
            locks.extend(map(lock_directory, places_of(settings)))
            decided = decide(settings, recipe, steps)
        except (AdaptiveError, RunFinished) as error:
            decided = error
            for lock in locks:
                lock.close()
    start = from_rank_0(decided)
    if isinstance(start, Exception):
        raise start
    assert start is not None, "rank 0 has decided"
    own_path = checkpoint_directory(settings).absolute()  # a relative one may be another on another node
    start = replace(start, claim=replace(start.claim, directory=own_path))
    _check_shared(start, settings)
    _leave_note(start, settings, launchers)
    return replace(start, locks=tuple(locks))


def checkpoint_directory(settings: Settings) -> Path:
    section = components.require(settings.config, "checkpointer")
    return Path(section.get("output_dir", None) or settings.output_dir)


def places_of(settings: Settings) -> list[Path]:
    """Where a run writes: its checkpoints, and its record where that is elsewhere."""
    places = checkpoint_directory(settings).absolute(), Path(settings.output_dir).absolute()
    return list(dict.fromkeys(places))


def decide(settings: Settings, recipe: str, steps: StepsOnRanks | None = None) -> Start:
    """On rank 0: looks at the output directory, and prepares it for what the run will write."""
    directory = checkpoint_directory(settings)
    checkpoints = store.find_checkpoints(directory)
    try:
        files, manifest = choose(settings, recipe, checkpoints, steps)
    except RunFinished:  # it may have been killed right after its last checkpoint
        with suppress(OSError):
            store.prune(directory, settings.keep_last_n_checkpoints, None)
            store.clean(directory)
        raise
    if files is not None:
        if manifest is not None:
            with suppress(OSError):  # the run would have removed them, had it not been killed, and may need the room
                store.prune(directory, settings.keep_last_n_checkpoints, files.folder.name)
        logger.info("resuming from %s%s", files.folder, f" ({manifest.position})" if manifest else "")
    elif settings.resume_from_checkpoint == AUTO:
        logger.info("fresh start: %s contains no checkpoint yet", directory)
    return Start(
        serial=1 + max((checkpoint.serial for checkpoint in checkpoints), default=-1),
        files=files,
        overwrites=len(checkpoints) if files is None else 0,
        claim=_prepare(directory),
    )


def choose(
    settings: Settings, recipe: str, checkpoints: Sequence[FoundCheckpoint], steps: StepsOnRanks | None = None
) -> tuple[Files | None, Manifest | None]:
    """What a run goes on from, and its manifest; nothing for a fresh start. Changes nothing."""
    directory, mode = checkpoint_directory(settings), settings.resume_from_checkpoint
    if fact := store.in_the_way(directory):
        raise ConfigError(f"{fact}: move it, or change output_dir")
    own: Sequence[FoundCheckpoint] = checkpoints if mode == AUTO else []
    if mode is True and THIS_RUN.restarted and (begun := run_state.read_record(Path(settings.output_dir))) is not None:
        # A launcher repeats the command, and a run that always went back to the same place might never get past it.
        own = [checkpoint for checkpoint in checkpoints if checkpoint.serial >= begun.serial]
    newest, skipped = store.newest_intact(own)
    for checkpoint in skipped:
        logger.warning("skipped: %s %s", checkpoint.path, checkpoint.fault)
    if newest is not None and newest.manifest is not None:
        _check_same_run(newest.manifest, settings, recipe, directory)
        position = newest.manifest.position
        # by the ranks that it had: on others a step has other samples, and what is half done would look finished
        if position.epochs >= settings.epochs if steps is None else position.step >= steps(newest.manifest.ranks):
            more = f"set epochs above {position.epochs}" if steps is None else "raise num_steps"
            raise RunFinished(
                f"nothing left to train: the run is finished, and its last checkpoint is {newest.path} ({position}); "
                f"{more} to continue from there"
            )
        _check_may_unpickle(newest, settings)
        return store.files_of(newest.path, newest.manifest), newest.manifest
    if mode is True:
        files, manifest = named_files(settings, recipe, directory, checkpoints)
        # in mid-epoch, a changed order or size of steps would repeat samples and miss others
        if manifest is not None and manifest.position.steps_in_epoch:
            _check_same_run(manifest, settings, recipe, directory)
        return files, manifest
    if checkpoints:
        _check_may_overwrite(checkpoints, settings, directory)
    return None, None


def _check_same_run(saved: Manifest, settings: Settings, recipe: str, directory: Path) -> None:
    if changed := difference(identity_of(settings.config, recipe), saved.identity):
        raise ConfigError(
            f"cannot resume: {changed} in the run whose checkpoints are in {directory}; set it back, or start a new "
            "run, either with another output_dir or with resume_from_checkpoint: False and overwrite_output_dir: True"
        )


def _check_may_unpickle(checkpoint: FoundCheckpoint, settings: Settings) -> None:
    """Reading a distributed checkpoint can run code. The user's config decides about that, not the folder."""
    if checkpoint.manifest and checkpoint.manifest.distributed and not settings.enable_async_checkpointing:
        raise ConfigError(
            f"cannot resume: {checkpoint.path} is in the format of asynchronous checkpoints, which torch unpickles, "
            "but enable_async_checkpointing is False: if you trust this folder, set enable_async_checkpointing=True to "
            "resume, else choose another output_dir"
        )


def _check_may_overwrite(checkpoints: Sequence[FoundCheckpoint], settings: Settings, directory: Path) -> None:
    """Refuses a fresh start beside these checkpoints, unless it may remove them: not where a launcher repeats the
    command, since they may be the run's own then."""
    fresh = settings.resume_from_checkpoint is False
    if fresh and settings.overwrite_output_dir and not THIS_RUN.restarted:
        _check_not_needed(settings.config, checkpoints)
        return
    names = ", ".join(checkpoint.name for checkpoint in checkpoints[:3]) + (", ..." if len(checkpoints) > 3 else "")
    complete = any(checkpoint.manifest for checkpoint in checkpoints)
    resume = "resume that run (resume_from_checkpoint=auto), " * (fresh and complete)
    overwrite = "set resume_from_checkpoint=False and overwrite_output_dir=True to remove them"
    raise ConfigError(
        f"output_dir {str(directory)!r} contains checkpoints of an earlier run{' or of this one' * THIS_RUN.restarted} "
        f"({names}), which a fresh start would mix with its own: {resume}choose another output_dir"
        f"{'' if THIS_RUN.restarted else f', or {overwrite}'}"
    )


def _check_not_needed(cfg: DictConfig, checkpoints: Sequence[FoundCheckpoint]) -> None:
    """Refuses to remove a folder that holds anything to start from, links followed."""
    section, folders = cfg.checkpointer, {checkpoint.path.resolve() for checkpoint in checkpoints}
    names = ["", *(str(section.get(key) or "") for key in ("adapter_checkpoint", "recipe_checkpoint"))]
    if isinstance(files := section.get("checkpoint_files"), ListConfig | DictConfig):
        names += file_names(files)
    for path in (Path(str(section.get("checkpoint_dir")), name).resolve() for name in names):
        if not folders.isdisjoint((path, *path.parents)):
            raise ConfigError(
                f"overwrite_output_dir is True, but the checkpointer reads {str(path)!r}, which would be removed: "
                "choose another output_dir"
            )


def _prepare(directory: Path) -> Claim:
    """Prepares the folder for checkpoints, so that what is wrong shows now."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        store.clean(directory)
        return store.claim(directory)
    except OSError as error:
        raise unwritable(directory, error) from error


def _check_shared(start: Start, settings: Settings) -> None:
    """Collective: a checkpoint that only one node has is lost to the others, and to the run that goes on elsewhere."""
    directory = checkpoint_directory(settings)
    # the folder alone would not tell: on a disk of its own, a rank may have one of an earlier run
    seen = from_all_ranks(start.claim.staging.exists())
    if all(seen):
        return
    message = (
        f"output_dir {str(directory)!r} is not shared by all nodes: rank {seen.index(False)} does not see rank 0's"
    )
    if settings.resume_from_checkpoint is not False or settings.enable_async_checkpointing:
        raise ConfigError(f"{message}; put it on a file system that all nodes mount")
    if dist.get_rank() == 0:
        logger.warning("%s; checkpoints are only on rank 0's node", message)


def _leave_note(start: Start, settings: Settings, launchers: list[str]) -> None:
    """Collective: leaves a note for whoever will start the run again; any rank may be the one that tells of its end."""
    if REHEARSAL.on:
        return
    place = Path(settings.output_dir).absolute()
    THIS_RUN.keep_record_in(place)
    finished = None
    if dist.get_rank() == 0:
        before = run_state.read_record(place)
        if before and before.ended == run_state.FINISHED:
            finished = before
        serial = before.serial if before and THIS_RUN.restarted else start.serial
        run_state.record_start(place, resume_command(), checkpoint_directory(settings), serial, launchers)
    THIS_RUN.finished_before = from_rank_0(finished)


def named_files(
    settings: Settings, recipe: str, directory: Path, checkpoints: Sequence[FoundCheckpoint]
) -> tuple[Files, Manifest | None]:
    """What the config names for `resume_from_checkpoint: True`, and its manifest where it has one. Weights and state
    have to be of one epoch, which torchtune takes on trust; what is not named comes from the folder of what is."""
    if not checkpoints:
        raise ConfigError(
            f"resume_from_checkpoint is True, but checkpointer.output_dir {str(directory)!r} contains no checkpoint: "
            "set it to that of the run to resume"
        )
    directory = directory.absolute()
    manifests = {checkpoint.path.absolute(): checkpoint.manifest for checkpoint in checkpoints if checkpoint.manifest}
    try:
        files = _named(settings, recipe, directory, list(manifests))
        manifest = manifests.get(files.folder)
        if manifest is not None and (name := store.changed_file(files.folder, manifest)) is not None:
            raise FileNotFoundError(f"{files.folder} is damaged: the content of {name} has changed")
    except FileNotFoundError as error:
        example = next((path.name for path in manifests), "epoch_0")
        without_names = f"resume_from_checkpoint=auto finds {example} without names; " * bool(manifests)
        raise ConfigError(
            f"resume_from_checkpoint is True, but {error}; {without_names}names are relative to {directory}, for "
            f"example checkpointer.checkpoint_files=[{example}/model-00001-of-00001.bin]"
        ) from None  # the message has all of it
    return replace(files, complete=manifest is not None), manifest


def _named(settings: Settings, recipe: str, directory: Path, complete: Sequence[Path]) -> Files:
    section = settings.config.checkpointer

    def newest(prefix: str, file: str) -> Path:
        """The newest epoch of our own that has this file, else the largest of torchtune's."""
        by_number = sorted(store.named(directory), key=lambda path: -int(path.name.rpartition("_")[2]))
        for folder in [*complete, *by_number]:
            if folder.name.startswith(prefix) and (folder / file).is_file():
                return folder
        raise FileNotFoundError(f"{directory} has no complete {prefix}... folder: none has {file}")

    def existing(name: object, key: str) -> Path:
        if not os.path.isfile(path := directory / str(name)):
            raise FileNotFoundError(f"checkpointer.{key} names {path}, which does not exist")
        return path

    if settings.enable_async_checkpointing:  # found without names, as in torchtune
        return Files(folder=newest("dist_epoch_", DISTRIBUTED_METADATA), distributed=True)
    state = existing(name, "recipe_checkpoint") if (name := section.get("recipe_checkpoint")) else None
    adapter = None
    if not saves_adapters(recipe):
        weights = [existing(name, "checkpoint_files") for name in file_names(section.get("checkpoint_files"))]
    else:
        if name := section.get("adapter_checkpoint"):
            adapter = existing(name, "adapter_checkpoint")
        elif state is not None and state.with_name(store.ADAPTER_FILE).is_file():
            adapter = state.with_name(store.ADAPTER_FILE)
        else:
            adapter = newest("epoch_", store.ADAPTER_FILE) / store.ADAPTER_FILE
        weights = []
    read = [adapter] if adapter else weights
    folder = read[0].parent
    if state is None:
        places = [place / store.RECIPE_STATE_FILE for place in (folder, directory / store.RECIPE_STATE)]
        if (state := next(filter(Path.is_file, places), None)) is None:
            raise FileNotFoundError(
                f"neither {folder} nor {directory / store.RECIPE_STATE} has a {store.RECIPE_STATE_FILE}"
            )
    homes = {path.resolve().parent for path in (*read, state)}
    of_ours = not homes.isdisjoint(path.resolve() for path in complete)  # else they are compared when they are read
    if len({path.parent for path in read}) > 1 or (len(homes) > 1 and of_ours):
        raise ConfigError(
            "resume_from_checkpoint is True, but weights and state are of several checkpoints "
            f"({', '.join(sorted(home.name for home in homes))}): use those of one, or name no recipe_checkpoint"
        )
    return Files(
        folder=folder,
        weights=tuple(map(str, weights)),
        adapter=str(adapter) if adapter else None,
        recipe_state=str(state),
    )
