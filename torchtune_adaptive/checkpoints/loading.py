"""Loads weights and state with torchtune's checkpointers.

Every rank reads the same files. If loading fails on any rank, all ranks raise the error of the lowest such rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune import training

from torchtune_adaptive.checkpoints import store
from torchtune_adaptive.checkpoints.store import Checkpointer, Files, State
from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.oom import is_oom
from torchtune_adaptive.engine.ranks import Value, from_all_ranks
from torchtune_adaptive.errors import AdaptiveError, CheckpointError, ConfigError, RunStopped
from torchtune_adaptive.lifecycle.run_state import THIS_RUN


def build_checkpointer(cfg: DictConfig, staging: Path, files: Files | None) -> Checkpointer:
    """Build torchtune's checkpointer, which reads the files to resume from and writes to the staging directory."""
    section = section_that_saves(cfg, "checkpointer", staging)
    if files is not None:
        # torchtune looks for an adapter in the last epoch of output_dir, and fails if there is no folder of an epoch
        (staging / "epoch_0").mkdir(parents=True, exist_ok=True)
        section.update(recipe_checkpoint=files.recipe_state, adapter_checkpoint=files.adapter)
        if files.adapter is None:  # with an adapter, the config names the base weights
            section["checkpoint_files"] = list(files.weights)
    built = components.build_section(
        "checkpointer", OmegaConf.create(section), should_load_recipe_state=files is not None
    )
    return cast(Checkpointer, built)


def load_reference(settings: Settings, key: str = "ref_checkpointer") -> State:
    """Collective: load the frozen weights that the checkpointer in section `key` of the config names."""
    section = section_writing_to(settings.config, key, Path(settings.output_dir) / store.SAVING)
    checkpointer = components.build_section(key, OmegaConf.create(section), should_load_recipe_state=False)
    weights: State = load_on_all_ranks(checkpointer.load_checkpoint, "the weights", key)[training.MODEL_KEY]
    return weights


def section_that_saves(cfg: DictConfig, key: str, staging: Path) -> dict[str, Any]:
    """Return the section of a checkpointer, as `section_writing_to` does. Raise ConfigError if saves would grow."""
    section = section_writing_to(cfg, key, staging)
    given = Path(str(section.get("checkpoint_dir"))).resolve()
    if str(section.get(COMPONENT)).startswith("torchtune.") and staging.resolve().is_relative_to(given):
        raise ConfigError(
            f"output_dir is inside {key}.checkpoint_dir ({given}), whose files torchtune copies into every checkpoint, "
            "so each would contain all earlier ones: set output_dir to a folder outside of it"
        )
    return section


def section_writing_to(cfg: DictConfig, key: str, staging: Path) -> dict[str, Any]:
    """Return the section of a checkpointer, with the staging directory as its output directory. Raise ConfigError if
    the directory of weights is missing. torchtune's error names neither key nor directory."""
    section = components.require(cfg, key)
    directory = section.get("checkpoint_dir")
    creates_files = not str(section.get(COMPONENT)).startswith("torchtune.training.")  # as the demo's checkpointer
    if not isinstance(directory, str) or not (creates_files or os.path.isdir(directory)):
        raise ConfigError(
            f"{key}.checkpoint_dir is {directory!r}, which is not a directory: "
            "download the weights first (tune download) or correct the path"
        )
    plain: Any = OmegaConf.to_container(section, resolve=True)
    return {**plain, "output_dir": str(staging)}


def load_on_all_ranks(work: Callable[[], Value], what: str, key: str = "checkpointer") -> Value:
    """Collective: run `work` on all ranks. If it fails on any, raise the error of the lowest such rank on all."""
    result, problem = None, None
    try:
        result = work()
    except AdaptiveError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - damaged files can raise any error
        if is_oom(error) or isinstance(error, MemoryError):
            problem = (
                f"out of memory while loading {what} on rank {dist.get_rank()}: use more ranks, or a smaller model"
            )
        else:
            problem = f"{key}: loading {what} failed on rank {dist.get_rank()}: {components.in_a_line(error)}"
    problems, stop_requested = zip(*from_all_ranks((problem, THIS_RUN.stop_requested())), strict=True)
    first = next(filter(None, problems), None)
    if first is not None:
        raise CheckpointError(first)
    if any(stop_requested):
        raise RunStopped("stopped during setup, before the first step")
    return cast(Value, result)
