"""Finds out where a run starts. Rank 0 decides for all ranks, by the intact checkpoints that `store.py` finds.

resume_from_checkpoint: False    a fresh start, in an output directory without checkpoints
                        auto     from the newest intact checkpoint of this run, or fresh if it has none at all
"""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.checkpoints import rank_0, store
from torchtune_adaptive.checkpoints.store import Files, FoundCheckpoint, Manifest, OutputDirectory
from torchtune_adaptive.config.keys import AUTO, Settings, flat
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import CheckpointError, ConfigError, RunFinished
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.lifecycle import run_state
from torchtune_adaptive.lifecycle.run_state import THIS_RUN, lock_directory, unwritable

logger = logging.getLogger(__name__)

RUN_KEYS = (
    "model",
    "tokenizer",
    "dataset",
    "shuffle",
    "seed",
    "batch_size",
    "gradient_accumulation_steps",
    "optimizer",
    "optimizer_in_bwd",
    "reward_and_value_model",
    "ppo_epochs",
    "ppo_batch_size",
    "max_generated_tokens",
    "temperature",
    "top_k",
    "stop_token_ids",
)
"""Keys whose values must not change when a run resumes."""
SIZES = "batch_size", "gradient_accumulation_steps"
SAMPLES_PER_STEP = "samples_per_step"
"""The samples of a step on all ranks together, according to the config. Not in PPO."""
MAY_BE_LOWERED = "tokenizer.max_seq_len"
"""May change, because out-of-memory errors advise to lower it."""
StepsOnRanks: TypeAlias = Callable[[int], int]
"""Returns the total steps of a run for a number of ranks. Used by recipes that count steps instead of epochs."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run: fresh, or from a checkpoint."""

    serial: int
    """The serial of the next checkpoint of the run."""
    files: Files | None = None
    """The checkpoint to resume from; None for a fresh start."""
    samples_per_step: int | None = None
    """The samples of a step on all ranks together, which stay the same if the number of ranks changes. None in PPO."""
    lock: IO[bytes] | None = None
    """On rank 0, the open file that locks the output directory."""
    directory: OutputDirectory

    def release(self) -> None:
        """Unlock the directory. Call it after the last write."""
        if self.lock is not None:
            self.lock.close()


def find_start(settings: Settings, recipe: str, *, ranks: int, steps: StepsOnRanks | None = None) -> Start:
    """Collective: return where the run starts, on this number of data-parallel ranks. Raise RunFinished or another
    error on all ranks or on none."""
    locks: list[IO[bytes]] = []  # on rank 0, because a lock cannot be sent

    def lock_and_decide() -> Start | Exception:
        try:
            locks.append(lock_directory(Path(settings.output_dir)))
            return decide(settings, recipe, ranks, steps)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            for lock in locks:
                lock.close()
            return error

    stuck = CheckpointError(f"{rank_0.no_progress()} while it verified the checkpoints in {settings.output_dir}")
    start = rank_0.run(lock_and_decide, if_stuck=stuck)
    if isinstance(start, Exception):
        raise start
    own_path = Path(settings.output_dir).absolute()  # a relative path may differ between nodes
    start = replace(start, directory=replace(start.directory, path=own_path))
    _check_shared(start, settings)
    begin_record(own_path, start.serial)
    return replace(start, lock=next(iter(locks), None))


def begin_record(directory: Path, serial: int) -> None:
    """Record that a run has started."""
    THIS_RUN.record_directory = directory  # on all ranks, because any rank may record the end
    if dist.get_rank() == 0:
        run_state.write_record(directory, run_state.RunRecord(serial=serial))


def decide(settings: Settings, recipe: str, ranks: int, steps: StepsOnRanks | None = None) -> Start:
    """On rank 0: choose where to start, and prepare the output directory."""
    directory = Path(settings.output_dir)
    try:
        checkpoints = store.find_checkpoints(directory)
    except OSError as error:
        raise unwritable(directory, error) from error
    try:
        files, manifest = choose_checkpoint(settings, recipe, checkpoints, ranks, steps)
    except RunFinished:  # the run may have been killed after its last save, before it cleaned up
        with suppress(OSError):
            store.prune(directory, settings.keep_last_n_checkpoints)
            store.clean(directory)
        raise
    samples = None if steps is not None else settings.samples_per_step * ranks
    if manifest is not None:
        samples = _samples_per_step(manifest)
        keeps_latest = manifest.position.steps_in_epoch or not multiplies_batch_size(settings)
        # raises an error before the weights are loaded
        with_samples_per_step(settings, samples, ranks, kept=manifest.latest_step_samples if keeps_latest else 0)
    if files is not None:
        with suppress(OSError):  # a run that was killed in a save may have left too many checkpoints
            store.prune(directory, settings.keep_last_n_checkpoints, files.folder.name)
        logger.info("resuming from %s%s", files.folder, f" ({manifest.position})" if manifest else "")
    elif settings.resume_from_checkpoint == AUTO:
        logger.info("fresh start: %s contains no checkpoint yet", directory)
    try:
        store.clean(directory)
        marked = OutputDirectory(path=directory.absolute(), mark=uuid.uuid4().hex)
        marked.staging.mkdir(parents=True)
    except OSError as error:
        raise unwritable(directory, error) from error
    serial = 1 + max((checkpoint.serial for checkpoint in checkpoints), default=-1)
    return Start(serial=serial, files=files, samples_per_step=samples, directory=marked)


def choose_checkpoint(
    settings: Settings,
    recipe: str,
    checkpoints: Sequence[FoundCheckpoint],
    ranks: int,
    steps: StepsOnRanks | None = None,
) -> tuple[Files | None, Manifest | None]:
    """Return the files to resume from and their manifest, or None and None for a fresh start. Changes no file."""
    resumes = checkpoints if settings.resume_from_checkpoint == AUTO else ()
    if resumes:
        logger.info("verifying the newest checkpoint in %s", settings.output_dir)
    newest, skipped = store.newest_intact(resumes)
    for checkpoint in skipped:
        logger.warning("skipped: %s %s", checkpoint.path, checkpoint.fault)
    if newest is not None and newest.manifest is not None:
        _check_same_run(newest.manifest, settings, recipe, ranks)
        _check_unfinished(newest.path, newest.manifest, settings, steps)
        return store.files_of(newest.path, newest.manifest), newest.manifest
    if checkpoints:
        raise _has_checkpoints(checkpoints, settings)
    return None, None


def _check_unfinished(path: Path, manifest: Manifest, settings: Settings, steps: StepsOnRanks | None) -> None:
    """Raise RunFinished if the checkpoint is from the end of the last epoch or, with `steps`, from the last step.

    The last step is computed for the number of ranks that have saved the checkpoint. With more ranks it would be lower,
    so an unfinished run could look finished.
    """
    position = manifest.position
    if position.epochs >= settings.epochs if steps is None else position.step >= steps(manifest.ranks):
        more = f"set epochs above {position.epochs}" if steps is None else "raise num_steps"
        if steps is None and not manifest.finished:
            raise ConfigError(f"cannot resume: {path} ({position}) is from a longer run than configured; {more}")
        raise RunFinished(
            f"nothing left to train: the run is finished, and its last checkpoint is {path} ({position}); "
            f"{more} to continue from there"
        )


def _samples_per_step(saved: Manifest) -> int | None:
    return cast(int | None, saved.identity.get(SAMPLES_PER_STEP))


def _check_same_run(saved: Manifest, settings: Settings, recipe: str, ranks: int) -> None:
    """Raise ConfigError if the config is that of another run. Batch size and accumulation may change if a step keeps
    its samples, unless another key multiplies them."""
    samples, before = _samples_per_step(saved), dict(saved.identity)
    current = identity_of(settings.config, recipe, samples)
    if settings.samples_per_step * ranks == samples and not multiplies_batch_size(settings):
        before |= {key: current[key] for key in SIZES}
    if changed := difference(current, before):
        products = f" (or to values with batch_size × gradient_accumulation_steps × {ranks} ranks = {samples})"
        resized = samples is not None and any(current.get(key) != before.get(key) for key in SIZES)
        raise ConfigError(
            f"cannot resume: {changed} in the run whose checkpoints are in {settings.output_dir}; set it back"
            f"{products * resized}, or start a new run with another output_dir"
        )


def with_samples_per_step(settings: Settings, samples: int | None, ranks: int, kept: int = 0) -> Settings:
    """Return the settings with which a step has this number of samples on all ranks together. Change the accumulation
    and, if necessary, the batch size. Raise ConfigError if that is impossible, or if the ranks cannot share the `kept`
    samples of the latest step. Return the settings if `samples` is None."""
    if samples is None:
        return settings
    rows = settings.batch_size
    unit = rows if multiplies_batch_size(settings) else 1
    units = math.gcd(samples // unit, kept)
    if units % ranks:
        possible = [str(count) for count in range(1, units + 1) if units % count == 0]
        larger = f" ({kept} in the checkpoint)" * (kept not in (0, samples))
        raise ConfigError(
            f"cannot resume on {count_of(ranks, 'rank')}: a step has {samples} samples{larger}, which ranks would not "
            f"share equally{f' in batches of {unit}' * (unit > 1)}; resume on {', '.join(possible)} ranks "
            "(--nproc_per_node), or start a new run with another output_dir"
        )
    on_rank = samples // ranks
    microbatches = next(count for count in range(-(-on_rank // rows), on_rank + 1) if on_rank % count == 0)
    if settings.optimizer_in_bwd and microbatches > 1:
        raise ConfigError(
            f"cannot resume on {count_of(ranks, 'rank')}: with optimizer_in_bwd, a step is one microbatch, so set "
            f"batch_size to {on_rank} and gradient_accumulation_steps to 1 to keep {samples} samples a step"
        )
    return replace(settings, batch_size=on_rank // microbatches, gradient_accumulation_steps=microbatches)


def multiplies_batch_size(settings: Settings) -> bool:
    """Return True if the samples of a step are a multiple of a batch size that may change during the run."""
    return settings.adaptive.accumulation == "fixed" or settings.config.get("batch_increase_function") is not None


def _has_checkpoints(checkpoints: Sequence[FoundCheckpoint], settings: Settings) -> ConfigError:
    names = ", ".join(checkpoint.path.name for checkpoint in checkpoints[:3]) + (
        ", ..." if len(checkpoints) > 3 else ""
    )
    fresh = settings.resume_from_checkpoint is False
    resume = "resume that run (resume_from_checkpoint=auto), " * (fresh and any(each.manifest for each in checkpoints))
    return ConfigError(
        f"output_dir {settings.output_dir!r} contains checkpoints of an earlier run ({names}), which a fresh start "
        f"would mix with its own: {resume}choose another output_dir, or remove this one"
    )


def _check_shared(start: Start, settings: Settings) -> None:
    """Collective: check that all ranks see rank 0's directory. Without it, a rank could not resume."""
    # looks for the staging directory, whose name is unique: a node may have an output directory of an earlier run
    seen = from_all_ranks(start.directory.staging.exists())
    if all(seen):
        return
    message = (
        f"output_dir {settings.output_dir!r} is not shared by all nodes: rank {seen.index(False)} does not see rank 0's"
    )
    if settings.resume_from_checkpoint is not False:
        raise ConfigError(f"{message}; put it on a file system that all nodes mount")
    if dist.get_rank() == 0:
        logger.warning("%s; checkpoints are only on rank 0's node", message)


def identity_of(cfg: DictConfig, recipe: str, samples_per_step: int | None = None) -> dict[str, object]:
    """Return the values that must not change, by dotted key."""
    plain = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    values = flat({"recipe": recipe, **{key: plain.get(key) for key in RUN_KEYS}})
    if samples_per_step is not None:
        values[SAMPLES_PER_STEP] = samples_per_step
    values.pop(MAY_BE_LOWERED, None)
    if recipe == "full_ppo":  # PPO uses this key only to split a step into microbatches
        values.pop("gradient_accumulation_steps", None)
    return cast(dict[str, object], json.loads(json.dumps(values, default=str)))  # as in a manifest


def difference(current: Mapping[str, object], saved: Mapping[str, object]) -> str | None:
    """Describe the keys that differ, with both values, or return None. If the recipe differs, ignore other keys."""
    current, saved = flat(current), flat(saved)  # a manifest may have lists
    another_recipe = current.get("recipe") != saved.get("recipe")
    changed = []
    for key in ["recipe"] if another_recipe else sorted(current.keys() | saved.keys()):
        now, before = (repr(values[key]) if key in values else "not set" for values in (current, saved))
        if now != before and current.get(key) != saved.get(key):  # NaN differs from NaN
            changed.append(f"{key} is {now}, but was {before}")
    return ", and ".join(changed) or None
