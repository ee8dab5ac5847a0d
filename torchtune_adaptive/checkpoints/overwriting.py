"""A fresh start among the checkpoints of another run: refused, or allowed to remove them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from torchtune_adaptive.checkpoints.folders import FoundCheckpoint
from torchtune_adaptive.checkpoints.named import file_names
from torchtune_adaptive.config.keys import AUTO, Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.this_run import was_restarted


def check_fresh_start(found: Sequence[FoundCheckpoint], settings: Settings, directory: Path, recipe: str) -> None:
    """Refuses a fresh start that would mix its checkpoints with those found, unless it may remove them."""
    if not found:
        return
    if _may_overwrite(settings):
        _check_not_needed(settings.config, found)
        return
    _check_not_its_own(found, settings, directory)
    names = ", ".join(each.name for each in found[:3]) + (", ..." if len(found) > 3 else "")
    raise ConfigError(
        f"output_dir {str(directory)!r} contains checkpoints of an earlier run ({names}), which a fresh start would "
        f"mix with its own: {_going_on(found, settings, recipe)}choose another output_dir, or set "
        "resume_from_checkpoint=False and overwrite_output_dir=True to remove them"
    )


def _check_not_its_own(found: Sequence[FoundCheckpoint], settings: Settings, directory: Path) -> None:
    """Where the launcher repeats the command, what it would let a fresh start remove may be what the run has saved."""
    if was_restarted() and settings.resume_from_checkpoint is False and any(each.manifest for each in found):
        raise ConfigError(
            f"the launcher has restarted this run with resume_from_checkpoint=False, but the checkpoints in "
            f"{str(directory)!r} may be its own: set resume_from_checkpoint=auto to resume from them"
        )


def _going_on(found: Sequence[FoundCheckpoint], settings: Settings, recipe: str) -> str:
    """How the run that was there goes on; nothing where it cannot."""
    if settings.resume_from_checkpoint != AUTO and any(each.manifest for each in found):
        return "resume that run (resume_from_checkpoint=auto), "
    if recipe == "full_ppo":  # which takes no files by their names
        return ""
    return "resume that run (resume_from_checkpoint=True and the files to resume from), "


def _may_overwrite(settings: Settings) -> bool:
    """Whether old checkpoints may go: never when the launcher has restarted the run, whose own they are."""
    wanted = settings.overwrite_output_dir and settings.resume_from_checkpoint is False
    return wanted and not was_restarted()


def _check_not_needed(cfg: DictConfig, found: Sequence[FoundCheckpoint]) -> None:
    """Refuses to remove a folder that holds anything to start from."""
    folders = {each.path.resolve() for each in found}
    for key, path in _read_at_the_start(cfg.checkpointer):
        if not folders.isdisjoint((path, *path.parents)):
            raise ConfigError(
                f"overwrite_output_dir is True, but checkpointer.{key} is {str(path)!r}, which would be removed: "
                "choose another output_dir"
            )


def _read_at_the_start(section: DictConfig) -> Iterator[tuple[str, Path]]:
    """The keys and paths of what the checkpointer reads, links followed."""
    folder = Path(str(section.get("checkpoint_dir"))).resolve()
    yield "checkpoint_dir", folder
    files = section.get("checkpoint_files")
    if isinstance(files, ListConfig | DictConfig):
        yield from (("checkpoint_files", (folder / name).resolve()) for name in file_names(files))
    for key in ("adapter_checkpoint", "recipe_checkpoint"):
        if isinstance(name := section.get(key), str):
            yield key, (folder / name).resolve()
