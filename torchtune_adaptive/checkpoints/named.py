"""`resume_from_checkpoint: True`, as torchtune has it: the config names the files, relative to the output directory.

Weights and state have to be of one epoch. torchtune takes its one `recipe_state/recipe_state.pt` and the adapter of
the largest epoch on trust; here what was not named comes from the folder of what was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.checkpoints.contents import saves_adapters
from torchtune_adaptive.checkpoints.folders import RECIPE_STATE, RECIPE_STATE_FILE, FoundCheckpoint
from torchtune_adaptive.checkpoints.manifest import Manifest, changed_file
from torchtune_adaptive.checkpoints.sources import ADAPTER_FILE, EPOCH_FOLDER, Files
from torchtune_adaptive.errors import ConfigError

DISTRIBUTED_METADATA = ".metadata"
"""The last file that torch.distributed.checkpoint writes."""


def named_files(
    cfg: DictConfig, recipe: str, *, asynchronous: bool, directory: Path, found: Sequence[FoundCheckpoint]
) -> tuple[Files, Manifest | None]:
    """What the config names, and its manifest where it has one."""
    if not found:
        raise ConfigError(
            f"resume_from_checkpoint is True, but checkpointer.output_dir {str(directory)!r} contains no checkpoint: "
            "set it to that of the run to resume"
        )
    section, directory = cfg.checkpointer, directory.absolute()
    try:
        if asynchronous:
            files = _newest_distributed(directory, found)
        elif saves_adapters(recipe):
            files = _adapter(section, directory, found)
        else:
            files = _weights(section, directory)
    except FileNotFoundError as error:
        raise ConfigError(f"resume_from_checkpoint is True, but {error}; {_advice(directory, found)}") from error
    known = {each.path.absolute(): each for each in found if each.manifest}
    _check_same_folder(files, known)
    if (own := known.get(files.folder)) is None or own.manifest is None:
        return files, None
    if (name := changed_file(own.path, own.manifest)) is not None:
        raise ConfigError(
            f"resume_from_checkpoint is True, but {own.path} is damaged: the content of {name} has changed; "
            f"{_advice(directory, found)}"
        )
    return replace(files, complete=True), own.manifest


def _weights(section: DictConfig, directory: Path) -> Files:
    paths = [directory / name for name in file_names(section.get("checkpoint_files"))]
    for path in paths:
        _require(path, "checkpointer.checkpoint_files")
    folder = paths[0].parent
    if other := next((path.parent for path in paths if path.parent != folder), None):
        raise ConfigError(
            f"resume_from_checkpoint is True, but checkpointer.checkpoint_files names files of {folder.name} and of "
            f"{other.name}: use those of one checkpoint"
        )
    state = _recipe_state(section, directory, folder)
    return Files(folder=folder, weights=tuple(map(str, paths)), recipe_state=str(state))


def _adapter(section: DictConfig, directory: Path, found: Sequence[FoundCheckpoint]) -> Files:
    named = section.get("adapter_checkpoint")
    folder = (directory / named).parent if named else _folder_of_adapter(section, directory, found)
    adapter = directory / named if named else folder / ADAPTER_FILE
    _require(adapter, "checkpointer.adapter_checkpoint")
    state = _recipe_state(section, directory, folder)
    return Files(folder=folder, adapter=str(adapter), recipe_state=str(state))


def _folder_of_adapter(section: DictConfig, directory: Path, found: Sequence[FoundCheckpoint]) -> Path:
    """Where the state is, if an adapter lies beside it; of our own checkpoints the newest; else the largest epoch's."""
    if section.get("recipe_checkpoint"):
        beside = [(directory / str(section.recipe_checkpoint)).resolve().parent]
    else:
        beside = [each.path for each in found if each.manifest and EPOCH_FOLDER.fullmatch(each.name)]
        beside += [(directory / RECIPE_STATE).resolve()]
    epochs = [path for path in directory.glob("epoch_*") if EPOCH_FOLDER.fullmatch(path.name)]
    largest_first = sorted(epochs, key=lambda path: -int(path.name.rpartition("_")[2]))
    for folder in [*beside, *largest_first]:
        if (folder / ADAPTER_FILE).is_file():
            return folder
    raise FileNotFoundError(f"no epoch in {directory} has an {ADAPTER_FILE}")


def _recipe_state(section: DictConfig, directory: Path, folder: Path) -> Path:
    if named := section.get("recipe_checkpoint"):
        _require(directory / named, "checkpointer.recipe_checkpoint")
        return directory / str(named)
    beside = folder / RECIPE_STATE_FILE
    for path in (beside, directory / RECIPE_STATE / RECIPE_STATE_FILE):
        if path.is_file():
            return path
    raise FileNotFoundError(f"neither {folder} nor {directory / RECIPE_STATE} has a {RECIPE_STATE_FILE}")


def _newest_distributed(directory: Path, found: Sequence[FoundCheckpoint]) -> Files:
    """Asynchronous checkpoints are found without names, as in torchtune: the newest epoch that is complete."""
    ours = [each.path for each in found if each.manifest and each.manifest.distributed and "epoch" in each.name]
    others = [path.parent for path in directory.glob(f"dist_epoch_*/{DISTRIBUTED_METADATA}")]
    by_epoch = sorted(others, key=lambda path: -int(path.name.rpartition("_")[2]))
    for folder in [*ours, *by_epoch]:
        return Files(folder=folder.absolute(), distributed=True)
    raise FileNotFoundError(f"{directory} has no complete dist_epoch_... folder")


def _check_same_folder(files: Files, known: dict[Path, FoundCheckpoint]) -> None:
    """Refuses a state that lies beside other weights, where either is of our own checkpoints."""
    if files.recipe_state is None:
        return
    home = Path(files.recipe_state).resolve().parent
    owners = {path.resolve(): found for path, found in known.items()}
    if home != files.folder.resolve() and (home in owners or files.folder.resolve() in owners):
        raise ConfigError(
            f"resume_from_checkpoint is True, but the weights are from {files.folder.name} and the state is from "
            f"{home.name}: use both of one checkpoint, or remove checkpointer.recipe_checkpoint"
        )


def file_names(value: object) -> list[str]:
    """The names in `checkpoint_files`: a list, or torchtune's short form for many of them."""
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    if isinstance(plain, list) and plain:
        return [str(name) for name in plain]
    if isinstance(plain, dict) and {"filename_format", "max_filename"} <= plain.keys():
        last = str(plain["max_filename"])
        numbers = (str(number).zfill(len(last)) for number in range(1, int(last) + 1))
        return [str(plain["filename_format"]).format(number, last) for number in numbers]
    raise ConfigError(f"checkpointer.checkpoint_files is {plain!r}: allowed is a list of names")


def _require(path: Path, key: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{key} names {path}, which does not exist")


def _advice(directory: Path, found: Sequence[FoundCheckpoint]) -> str:
    complete = [each.name for each in found if each.manifest]
    if complete:
        files = f"checkpointer.checkpoint_files=[{complete[0]}/model-00001-of-00001.bin]"
        return (
            f"resume_from_checkpoint=auto finds {complete[0]} without names; "
            f"names are relative to {directory}, for example {files}"
        )
    return (
        "to resume, checkpointer.output_dir must be that of an unfinished run, and names are relative to it, for "
        "example checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]"
    )
