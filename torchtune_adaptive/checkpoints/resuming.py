"""Find where a run starts. Rank 0 looks at the output directory and decides for all ranks.

resume_from_checkpoint: False    fresh, in an output directory without checkpoints, or with overwrite_output_dir
                        auto     from the newest complete checkpoint of this run, or fresh without one
                        True     as in torchtune: from the files that the config names
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
from torchtune_adaptive.checkpoints.identity import INITIAL_WEIGHTS, difference, file_names, identity_of, saves_adapters
from torchtune_adaptive.checkpoints.store import Claim, Files, FoundCheckpoint, Manifest
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import AUTO, Settings
from torchtune_adaptive.engine.ranks import from_all_ranks, from_rank_0
from torchtune_adaptive.errors import AdaptiveError, ConfigError, RunFinished
from torchtune_adaptive.lifecycle import run_state
from torchtune_adaptive.lifecycle.console import log_if_slow
from torchtune_adaptive.lifecycle.run_state import RESTARTS, THIS_RUN, lock_directory, resume_command, unwritable
from torchtune_adaptive.lifecycle.torchrun import this_launcher
from torchtune_adaptive.rehearsal_flag import REHEARSAL

logger = logging.getLogger(__name__)

StepsOnRanks: TypeAlias = Callable[[int], int]
"""Total steps of a run by number of ranks, for runs that count steps instead of epochs."""

DISTRIBUTED_METADATA = ".metadata"
"""The last file that torch.distributed.checkpoint writes."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run: fresh, or from a checkpoint."""

    serial: int
    """Serial of the run's next checkpoint."""
    files: Files | None = None
    """The checkpoint to resume from, unless the start is fresh."""
    locks: tuple[IO[bytes], ...] = ()
    """On rank 0: open files that lock the directories of the run."""
    overwrites: int = 0
    """Number of another run's checkpoints, to be removed just before training starts."""
    claim: Claim
    """The claim on the directory of checkpoints; ranks that do not see its mark have another directory."""
    damaged: frozenset[int] = frozenset()
    """Serials of checkpoints that were skipped; they do not count towards `keep_last_n_checkpoints`."""

    @property
    def resumes(self) -> bool:
        """True if the run resumes from a checkpoint."""
        return self.files is not None

    def release(self) -> None:
        """Unlock the directories, after the last write."""
        for lock in self.locks:
            lock.close()


@log_if_slow("looked for a checkpoint and verified its files")
def find_start(settings: Settings, recipe: str, *, steps: StepsOnRanks | None = None) -> Start:
    """Collective: return where the run starts; raise `RunFinished` or the same error on every rank."""
    decided: Start | Exception | None = None
    locks: list[IO[bytes]] = []
    launchers = sorted(set(filter(None, from_all_ranks(this_launcher()))))
    if dist.get_rank() == 0:
        before = run_state.read_record(Path(settings.output_dir))
        # a launcher counts only the restarts that its own ranks caused
        again = before is not None and not set(launchers).isdisjoint(before.launchers)
        THIS_RUN.restarted = again or os.environ.get(RESTARTS, "0") != "0"
        try:
            locks.extend(map(lock_directory, written_directories(settings)))
            decided = decide(settings, recipe, steps)
        except (AdaptiveError, RunFinished) as error:
            decided = error
            for lock in locks:
                lock.close()
    start = from_rank_0(decided)
    if isinstance(start, Exception):
        raise start
    assert start is not None, "rank 0 has decided"
    own_path = checkpoint_directory(settings).absolute()  # a relative path may differ between nodes
    start = replace(start, claim=replace(start.claim, directory=own_path))
    _check_shared(start, settings)
    _record_start(start, settings, launchers)
    return replace(start, locks=tuple(locks))


def checkpoint_directory(settings: Settings) -> Path:
    """Return the directory of checkpoints: `checkpointer.output_dir`, or `output_dir`."""
    section = components.require(settings.config, "checkpointer")
    return Path(section.get("output_dir", None) or settings.output_dir)


def written_directories(settings: Settings) -> list[Path]:
    """Return the directories that a run writes to: that of its checkpoints, and output_dir if it is another one."""
    return list(dict.fromkeys([checkpoint_directory(settings).absolute(), Path(settings.output_dir).absolute()]))


def decide(settings: Settings, recipe: str, steps: StepsOnRanks | None = None) -> Start:
    """On rank 0: choose where to start, and prepare the output directory."""
    directory = checkpoint_directory(settings)
    checkpoints = store.find_checkpoints(directory)
    try:
        files, manifest = choose_checkpoint(settings, recipe, checkpoints, steps)
    except RunFinished:  # possibly killed right after its last checkpoint, or while it wrote another file
        with suppress(OSError):
            store.prune(directory, settings.keep_last_n_checkpoints, None)
            store.clean(directory)
            for unfinished in Path(settings.output_dir).glob("adaptive_*.tmp"):
                unfinished.unlink()
        raise
    damaged: frozenset[int] = frozenset()
    if files is not None:
        if manifest is not None:
            if settings.resume_from_checkpoint == AUTO:  # which skipped all newer ones
                damaged = frozenset(found.serial for found in checkpoints if found.serial > manifest.serial)
            with suppress(OSError):  # a killed run may have left more checkpoints than it keeps
                store.prune(directory, settings.keep_last_n_checkpoints, files.folder.name, damaged)
        logger.info("resuming from %s%s", files.folder, f" ({manifest.position})" if manifest else "")
    elif settings.resume_from_checkpoint == AUTO:
        logger.info("fresh start: %s contains no checkpoint yet", directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        store.clean(directory)
        claim = store.claim(directory)
    except OSError as error:
        raise unwritable(directory, error) from error
    serial = 1 + max((checkpoint.serial for checkpoint in checkpoints), default=-1)
    overwrites = len(checkpoints) if files is None else 0
    return Start(serial=serial, files=files, overwrites=overwrites, claim=claim, damaged=damaged)


def choose_checkpoint(
    settings: Settings, recipe: str, checkpoints: Sequence[FoundCheckpoint], steps: StepsOnRanks | None = None
) -> tuple[Files | None, Manifest | None]:
    """Return the files to resume from and their manifest; None for a fresh start. Changes no file."""
    directory, mode = checkpoint_directory(settings), settings.resume_from_checkpoint
    own: Sequence[FoundCheckpoint] = checkpoints if mode == AUTO else []
    if mode is True and THIS_RUN.restarted and (begun := run_state.read_record(Path(settings.output_dir))) is not None:
        # A launcher repeats the command. A run that always resumed from the same checkpoint might never finish.
        own = [checkpoint for checkpoint in checkpoints if checkpoint.serial >= begun.serial]
    newest, skipped = store.newest_intact(own)
    for checkpoint in skipped:
        logger.warning("skipped: %s %s", checkpoint.path, checkpoint.fault)
    files: Files
    manifest: Manifest | None
    if newest is not None and newest.manifest is not None:
        files, manifest = store.files_of(newest.path, newest.manifest), newest.manifest
        _check_same_run(manifest, settings, recipe, directory)
        _check_unfinished(newest.path, manifest, settings, steps)
    elif mode is True:
        files, manifest = named_files(settings, recipe, directory, checkpoints)
        # within an epoch, another order or size of steps would repeat samples and skip others
        if manifest is not None and manifest.position.steps_in_epoch:
            _check_same_run(manifest, settings, recipe, directory)
    else:
        if checkpoints:
            _check_may_overwrite(checkpoints, settings, directory)
        return None, None
    if files.distributed and not settings.enable_async_checkpointing:
        # reading it can run code: the user's config decides about that, not the folder
        raise ConfigError(
            f"cannot resume: {files.folder} is in the format of asynchronous checkpoints, which torch unpickles, "
            "but enable_async_checkpointing is False: if you trust this folder, set "
            "enable_async_checkpointing=True to resume, else choose another output_dir"
        )
    return files, manifest


def _check_unfinished(path: Path, manifest: Manifest, settings: Settings, steps: StepsOnRanks | None) -> None:
    """Raise RunFinished after the last epoch or, with `steps`, after the last step.

    The number of steps is that of the ranks that saved the checkpoint. On more ranks, a run has fewer steps, so an
    unfinished run could look finished.
    """
    position = manifest.position
    if position.epochs >= settings.epochs if steps is None else position.step >= steps(manifest.ranks):
        more = f"set epochs above {position.epochs}" if steps is None else "raise num_steps"
        raise RunFinished(
            f"nothing left to train: the run is finished, and its last checkpoint is {path} ({position}); "
            f"{more} to continue from there"
        )


def _check_same_run(saved: Manifest, settings: Settings, recipe: str, directory: Path) -> None:
    configured = identity_of(settings.config, recipe)
    if changed := difference(configured, saved.identity):
        raise ConfigError(
            f"cannot resume: {changed} in the run whose checkpoints are in {directory}; set it back, or start a new "
            "run, either with another output_dir or with resume_from_checkpoint: False and overwrite_output_dir: True"
        )
    if configured.get(INITIAL_WEIGHTS) != saved.identity.get(INITIAL_WEIGHTS):
        logger.warning(
            "checkpointer names other weights than those that the run in %s started from, or missing ones; the run "
            "continues from its checkpoint. To train from the named weights, set another output_dir",
            directory,
        )


def _check_may_overwrite(checkpoints: Sequence[FoundCheckpoint], settings: Settings, directory: Path) -> None:
    """Raise ConfigError unless a fresh start may remove these checkpoints.

    After a restart by the launcher, it may not: the checkpoints may be this run's.
    """
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
    """Raise ConfigError if the checkpointer reads a file in one of these checkpoints, also through a link."""
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


def _check_shared(start: Start, settings: Settings) -> None:
    """Collective: check that all ranks see rank 0's directory; other nodes could not resume from its checkpoints."""
    directory = checkpoint_directory(settings)
    # the mark, because a node may have a directory of the same name from an earlier run
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


def _record_start(start: Start, settings: Settings, launchers: list[str]) -> None:
    """Write `adaptive_run.json` on rank 0; any rank may record the end."""
    if REHEARSAL.on:
        return
    output_dir = Path(settings.output_dir).absolute()
    THIS_RUN.keep_record_in(output_dir)
    if dist.get_rank() == 0:
        before = run_state.read_record(output_dir)
        serial = before.serial if before and THIS_RUN.restarted else start.serial
        run_state.record_start(output_dir, resume_command(), checkpoint_directory(settings), serial, launchers)


def named_files(
    settings: Settings, recipe: str, directory: Path, checkpoints: Sequence[FoundCheckpoint]
) -> tuple[Files, Manifest | None]:
    """Return the files that the config names for `resume_from_checkpoint: True`, and their manifest if there is one.

    In a checkpoint with a manifest, the name of one file selects all files. torchtune's recipes save weights and recipe
    state in different folders, so the config must name each of these files, unless it has torchtune's default name.
    """
    if not checkpoints:
        raise ConfigError(
            f"resume_from_checkpoint is True, but checkpointer.output_dir {str(directory)!r} contains no checkpoint: "
            "set it to that of the run to resume"
        )
    directory, section, adapter = directory.absolute(), settings.config.checkpointer, saves_adapters(recipe)
    complete = {checkpoint.path.resolve(): checkpoint for checkpoint in checkpoints if checkpoint.manifest}
    state = directory / str(name) if (name := section.get("recipe_checkpoint")) else None
    try:
        if settings.enable_async_checkpointing:  # found without names, as in torchtune
            weights = [_newest_with(DISTRIBUTED_METADATA, "dist_epoch_", directory, checkpoints)]
        elif not adapter:
            weights = [directory / name for name in file_names(section.get("checkpoint_files"))]
        elif name := section.get("adapter_checkpoint"):
            weights = [directory / str(name)]
        elif state is not None and state.with_name(store.ADAPTER_FILE).is_file():
            weights = [state.with_name(store.ADAPTER_FILE)]
        else:
            weights = [_newest_with(store.ADAPTER_FILE, "epoch_", directory, checkpoints)]
        folders = {path.resolve().parent for path in (*weights, state) if path is not None}
        ours = next((checkpoint for folder, checkpoint in complete.items() if folder in folders), None)
        if len({path.parent for path in weights}) > 1 or (ours is not None and len(folders) > 1):
            raise ConfigError(
                "resume_from_checkpoint is True, but weights and state are from several checkpoints "
                f"({', '.join(sorted(folder.name for folder in folders))}): use those of one, or name no "
                "recipe_checkpoint"
            )
        if ours is None and state is None and not settings.enable_async_checkpointing:
            state = directory / store.RECIPE_STATE / store.RECIPE_STATE_FILE
        for path in (*weights, state):
            if path is not None and not os.path.isfile(path):
                raise FileNotFoundError(f"checkpointer names {path}, which does not exist")
        if ours is not None and ours.manifest is not None:
            if (name := store.changed_file(ours.path, ours.manifest)) is not None:
                raise FileNotFoundError(f"{ours.path} is damaged: the content of {name} has changed")
            return store.files_of(ours.path, ours.manifest), ours.manifest
    except FileNotFoundError as error:
        example = next((path.name for path in complete), "epoch_0")
        without_names = f"resume_from_checkpoint=auto finds {example} without names; " * bool(complete)
        raise ConfigError(
            f"resume_from_checkpoint is True, but {error}; {without_names}names are relative to {directory}, for "
            f"example checkpointer.checkpoint_files=[{example}/model-00001-of-00001.bin]"
        ) from None  # the message contains the cause
    files = Files(
        folder=weights[0].parent,
        distributed=settings.enable_async_checkpointing,
        weights=() if adapter else tuple(map(str, weights)),
        adapter=str(weights[0]) if adapter else None,
        recipe_state=str(state),
    )
    return files, None


def _newest_with(file: str, prefix: str, directory: Path, checkpoints: Sequence[FoundCheckpoint]) -> Path:
    """Return this file of the newest complete checkpoint, or of torchtune's checkpoint of the last epoch."""
    complete = [checkpoint.path.absolute() for checkpoint in checkpoints if checkpoint.manifest]
    by_number = sorted(store.named(directory), key=lambda path: -int(path.name.rpartition("_")[2]))
    for folder in [*complete, *by_number]:
        if folder.name.startswith(prefix) and (folder / file).is_file():
            return folder / file
    raise FileNotFoundError(f"{directory} has no complete {prefix}... folder: none has {file}")
