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
from torchtune_adaptive.checkpoints.store import (
    ADAPTER_FILE,
    RECIPE_STATE,
    RECIPE_STATE_FILE,
    Files,
    FoundCheckpoint,
    Manifest,
    changed_file,
    named,
)
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError

DISTRIBUTED_METADATA = ".metadata"
"""The last file that torch.distributed.checkpoint writes."""


def named_files(
    settings: Settings, recipe: str, directory: Path, checkpoints: Sequence[FoundCheckpoint]
) -> tuple[Files, Manifest | None]:
    """What the config names, and its manifest where it has one."""
    if not checkpoints:
        raise ConfigError(
            f"resume_from_checkpoint is True, but checkpointer.output_dir {str(directory)!r} contains no checkpoint: "
            "set it to that of the run to resume"
        )
    section, directory = settings.config.checkpointer, directory.absolute()
    manifests = {checkpoint.path.absolute(): checkpoint.manifest for checkpoint in checkpoints if checkpoint.manifest}
    example = next((path.name for path in manifests), "epoch_0")
    advice = (
        f"names are relative to {directory}, for example "
        f"checkpointer.checkpoint_files=[{example}/model-00001-of-00001.bin]"
    )
    if manifests:
        advice = f"resume_from_checkpoint=auto finds {example} without names; {advice}"
    try:
        if settings.enable_async_checkpointing:  # found without names, as in torchtune
            files = Files(folder=_newest(directory, manifests, "dist_epoch_", DISTRIBUTED_METADATA), distributed=True)
        elif saves_adapters(recipe):
            files = _adapter(section, directory, manifests)
        else:
            files = _weights(section, directory)
        _check_same_folder(files, manifests)
        manifest = manifests.get(files.folder)
        if manifest is not None and (name := changed_file(files.folder, manifest)) is not None:
            raise FileNotFoundError(f"{files.folder} is damaged: the content of {name} has changed")
    except FileNotFoundError as error:
        raise ConfigError(f"resume_from_checkpoint is True, but {error}; {advice}") from error
    return replace(files, complete=manifest is not None), manifest


def _weights(section: DictConfig, directory: Path) -> Files:
    paths = [directory / name for name in file_names(section.get("checkpoint_files"))]
    folder = paths[0].parent
    for path in paths:
        _require(path, "checkpointer.checkpoint_files")
        if path.parent != folder:
            raise ConfigError(
                "resume_from_checkpoint is True, but checkpointer.checkpoint_files names files of "
                f"{folder.name} and of {path.parent.name}: use those of one checkpoint"
            )
    state = _recipe_state(section, directory, folder)
    return Files(folder=folder, weights=tuple(map(str, paths)), recipe_state=str(state))


def _adapter(section: DictConfig, directory: Path, manifests: dict[Path, Manifest]) -> Files:
    """The adapter that is named, or the one beside the state that is; else the last epoch's."""
    name, state = section.get("adapter_checkpoint"), section.get("recipe_checkpoint")
    beside = (directory / str(state)).resolve().with_name(ADAPTER_FILE) if state else None
    if name:
        adapter = directory / str(name)
        _require(adapter, "checkpointer.adapter_checkpoint")
    elif beside is not None and beside.is_file():
        adapter = beside
    else:
        adapter = _newest(directory, manifests, "epoch_", ADAPTER_FILE) / ADAPTER_FILE
    folder = adapter.parent
    state = _recipe_state(section, directory, folder)
    return Files(folder=folder, adapter=str(adapter), recipe_state=str(state))


def _newest(directory: Path, manifests: dict[Path, Manifest], prefix: str, file: str) -> Path:
    """The newest epoch of our own that has this file, else the largest of torchtune's."""
    by_number = sorted(named(directory), key=lambda path: -int(path.name.rpartition("_")[2]))
    for folder in [*manifests, *by_number]:
        if folder.name.startswith(prefix) and (folder / file).is_file():
            return folder
    raise FileNotFoundError(f"{directory} has no complete {prefix}... folder: none has {file}")


def _recipe_state(section: DictConfig, directory: Path, folder: Path) -> Path:
    if name := section.get("recipe_checkpoint"):
        _require(directory / str(name), "checkpointer.recipe_checkpoint")
        return directory / str(name)
    for place in (folder, directory / RECIPE_STATE):
        if (place / RECIPE_STATE_FILE).is_file():
            return place / RECIPE_STATE_FILE
    raise FileNotFoundError(f"neither {folder} nor {directory / RECIPE_STATE} has a {RECIPE_STATE_FILE}")


def _require(path: Path, key: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{key} names {path}, which does not exist")


def _check_same_folder(files: Files, manifests: dict[Path, Manifest]) -> None:
    """Refuses a state that lies beside other weights, where either is of our own checkpoints."""
    if files.recipe_state is None:
        return
    folders = {Path(files.recipe_state).resolve().parent, files.folder.resolve()}
    if len(folders) > 1 and not folders.isdisjoint(path.resolve() for path in manifests):
        home = Path(files.recipe_state).resolve().parent.name
        raise ConfigError(
            f"resume_from_checkpoint is True, but the weights are from {files.folder.name} and the state is from "
            f"{home}: use both of one checkpoint, or remove checkpointer.recipe_checkpoint"
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
