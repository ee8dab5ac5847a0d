"""Check a config with the checks of a run, in the same order, on a machine that may be unable to train it.

Components are built if that has no side effects. Otherwise their arguments are compared with their signatures.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from omegaconf import DictConfig, ListConfig
from torch import nn
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.checkpoints.loading import check_copied_files, check_names, missing_directory
from torchtune_adaptive.checkpoints.progress import start_progress
from torchtune_adaptive.checkpoints.resuming import checkpoint_directory, choose_checkpoint, written_directories
from torchtune_adaptive.checkpoints.store import find_checkpoints
from torchtune_adaptive.config import components
from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.config.registry import FULL_DPO, GRPO, GRPO_LORA, LORA_DPO, PLAN, PPO, Recipe
from torchtune_adaptive.config.remedies import in_keys
from torchtune_adaptive.errors import AdaptiveError, ConfigError, RunFinished, SeveralErrors
from torchtune_adaptive.forecast.request import read_request
from torchtune_adaptive.formatting import size_for_rank
from torchtune_adaptive.lifecycle.run_state import in_use, lock_holder
from torchtune_adaptive.rl.limits import check_room
from torchtune_adaptive.rl.ppo import build_ppo_loss
from torchtune_adaptive.rl.rewards import functions_of
from torchtune_adaptive.rl.settings import REWARD_SECTION, VALUE_SECTION
from torchtune_adaptive.tune import distributed
from torchtune_adaptive.tune.data import PAIRS_ARE_NOT_PACKED, build_collate, is_packed
from torchtune_adaptive.tune.dealing import obstacle_to_dealing
from torchtune_adaptive.tune.finetuning import check_cuts, check_sequence_length, checked_loss, obstacle_to_recovery
from torchtune_adaptive.tune.metrics import profiler_is_enabled
from torchtune_adaptive.tune.model import META, build_on_device, check_replicas_of
from torchtune_adaptive.tune.preference import build_preference_loss
from torchtune_adaptive.tune.schedule import build_increase_function, check_growth
from torchtune_adaptive.tune.unpadded import is_padded

Value = TypeVar("Value")

SOME_STEPS = 100
"""Steps of the run for the scheduler, since the dataset is not read."""


class Findings:
    """All errors of a config, and notes about the machine, which are errors if the run will use this machine."""

    def __init__(self, *, here: bool) -> None:
        self.errors: dict[str, None] = {}
        """Messages in order, without duplicates."""
        self.notes: list[str] = []
        self._here = here

    def collect(self, check: Callable[..., Value], *args: Any, **kwargs: Any) -> Value | None:
        """Return the result of a check; record its error and return None if it fails."""
        try:
            return check(*args, **kwargs)
        except AdaptiveError as error:
            if _may_be_elsewhere(error):
                self.missing(in_keys(error))
                return None
            self.errors |= dict.fromkeys(map(in_keys, error.errors if isinstance(error, SeveralErrors) else [error]))
        return None

    def missing(self, what: str) -> None:
        """Record something that this machine lacks."""
        if self._here:
            self.errors[what] = None
        else:
            self.notes.append(f"on this machine: {what}")


def _may_be_elsewhere(error: BaseException) -> bool:
    """Return True if a component lacks a file or a package other than its own, which another machine may have."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ModuleNotFoundError):
        return not re.search(rf"(?<![\w.]){str(cause.name).split('.')[0]}\.", str(error))
    return "No such file or directory" in str(cause)  # tokenizers raise several types of errors


def check_config(cfg: DictConfig, recipe: Recipe, ranks: int | None, *, here: bool) -> Findings:
    """Check a config for a recipe. `ranks` is None if unknown. `here`: the run will use this machine."""
    findings = Findings(here=here)
    check = findings.collect
    check(check_keys, cfg, recipe.keys, aloud=True)
    if recipe is PLAN:
        check(read_request, cfg, "", ())
        return findings
    settings, own = check(recipe.read, cfg) or (None, None)
    if settings is not None:
        cfg = settings.config  # with PPO's policy as the model
    elif recipe is PPO:
        return findings

    model = check(_build_model, cfg)
    check(components.build, "tokenizer", cfg)
    check(_check_dataset, cfg, findings)
    check(_check_optimizer, cfg)
    check(lambda: check_fits("metric_logger", components.require(cfg, "metric_logger")))
    if cfg.get("profiler") is not None and check(profiler_is_enabled, cfg.profiler):
        check(check_fits, "profiler", cfg.profiler)
    for key in [key for key in ("checkpointer", "ref_checkpointer", *recipe.keys) if key.endswith("checkpointer")]:
        if cfg.get(key) is not None or key == "checkpointer":
            check(_check_checkpointer, key, components.require(cfg, key))
    if recipe in (FULL_DPO, LORA_DPO):
        check(_check_pairs, cfg)
    elif recipe in (GRPO, GRPO_LORA):
        check(functions_of, cfg)
    elif recipe is not PPO:
        check(_check_loss, cfg, settings, model)
    if settings is None:
        check(build_increase_function, cfg)
    else:
        _check_together(settings, own, recipe, model, ranks, findings)
        check(_check_folders, settings, recipe, findings)
    return findings


def _build_model(cfg: DictConfig, key: str = "model") -> nn.Module:
    def pairs_of(weight: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.empty(weight.numel() // 2, dtype=torch.uint8, device=weight.device)

    # Skip the conversion to NF4, which processes a million weights at a time. On meta only the shape matters.
    at_once = patch.multiple(NF4Tensor, convert_to_norm_float_weight=staticmethod(pairs_of))
    with at_once, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # errors name the key of a wrong size
        return build_on_device(META, cfg, torch.float32, key)


def _check_dataset(cfg: DictConfig, findings: Findings) -> None:
    """Check the section of the dataset, without reading samples."""
    section = components.require_parts(cfg, "dataset")
    several = isinstance(section, ListConfig)
    for at, part in enumerate(section if several else [section]):
        key = f"dataset[{at}]" if several else "dataset"
        check_fits(key, part, None)
        if unchecked := [f"{key}.{name}" for name in components.unchecked_arguments(part) if name != "data_files"]:
            component = part[COMPONENT].rpartition(".")[2]
            findings.notes.append(f"{', '.join(unchecked)}: not checked, since {component} accepts any argument")
        files = part.get("data_files")
        for file in (
            [files] if isinstance(files, str) else list(files or ())
        ):  # a file name, a list or a section by split
            path = str(files[file] if isinstance(files, DictConfig) else file)
            if "://" not in path and not glob(path):
                findings.missing(f"{key}.data_files is {path!r}, which does not exist: correct the path")


def _check_checkpointer(key: str, section: DictConfig) -> None:
    check_fits(key, section, should_load_recipe_state=False)
    check_names(key, section)


def _check_optimizer(cfg: DictConfig) -> None:
    optimizer = components.build("optimizer", cfg, [nn.Parameter(torch.zeros(1))])
    if cfg.get("lr_scheduler") is not None:
        components.build("lr_scheduler", cfg, optimizer, num_training_steps=SOME_STEPS, last_epoch=-1)


def check_fits(key: str, section: Any, *args: object, **kwargs: object) -> None:
    """Raise ConfigError if a component cannot be imported, or does not accept the arguments in its section."""
    path = components.path_of(key, section)
    try:
        _get_component_from_path(path)
    except Exception as error:
        reason = components.in_a_line(error)
        raise ConfigError(f"{key}.{COMPONENT} is {path!r}, which cannot be imported: {reason}") from error
    if wrong := components.argument_error(key, section, args, kwargs) or components.value_error(key, section):
        raise ConfigError(wrong)


def _check_loss(cfg: DictConfig, settings: Settings | None, model: nn.Module | None) -> None:
    """Check the loss, and the collate function with the loss's ignored label."""
    loss = checked_loss(cfg)
    if settings is not None and not is_packed(cfg):
        build_collate(settings, SimpleNamespace(pad_id=0), cast(int, loss.ignore_index), packed=False)
    if model is not None:
        check_cuts(loss, model)


def _check_pairs(cfg: DictConfig) -> None:
    if is_packed(cfg):
        raise ConfigError(PAIRS_ARE_NOT_PACKED)
    build_preference_loss(cfg)


def _check_together(
    settings: Settings, own: Any, recipe: Recipe, model: nn.Module | None, ranks: int | None, findings: Findings
) -> None:
    check, adaptive, packed = findings.collect, settings.adaptive, is_packed(settings.config)
    check(obstacle_to_recovery, settings)
    check(check_growth, settings)
    check(start_progress, settings, ranks=1)
    device = check(distributed.device_named, settings)
    if model is not None:
        check(check_sequence_length, model, adaptive)
        check(check_replicas_of, model, settings)
        check(obstacle_to_dealing, model, settings, packed=packed)
        if device is not None:
            check(is_padded, model, settings, device, packed=packed)
    if recipe is PPO:
        check(build_ppo_loss, settings)
        value = check(_build_model, settings.config, VALUE_SECTION)
        if model is not None and value is not None:
            check(check_room, (model, value), adaptive, own.max_generated_tokens)
        check(own.iterations, ranks or 1)
    elif recipe in (GRPO, GRPO_LORA):
        models = [model]
        if settings.config.get(REWARD_SECTION) is not None:
            models.append(check(_build_model, settings.config, REWARD_SECTION))
        if None not in models:
            check(check_room, models, adaptive, own.max_generated_tokens)
    if ranks is not None:
        check(distributed.mesh_shape, settings, ranks)
        if adaptive.memory_limit is not None:
            check(size_for_rank, adaptive.memory_limit, 0, ranks, "adaptive.memory_limit")


def _check_folders(settings: Settings, recipe: Recipe, findings: Findings) -> None:
    """Check the device, the weights and the output directory."""
    try:
        distributed.dtype_of(settings, distributed.device_of(settings))
    except ConfigError as error:
        findings.missing(str(error))
    section = components.require(settings.config, "checkpointer")
    if (problem := missing_directory(section)) is not None:
        findings.missing(problem)
    else:
        check_copied_files(section)
    for folder in written_directories(settings):
        if (who := lock_holder(folder)) is not None:
            raise in_use(folder, who)
    with suppress(RunFinished):
        choose_checkpoint(settings, recipe.saved_as, find_checkpoints(checkpoint_directory(settings)))
