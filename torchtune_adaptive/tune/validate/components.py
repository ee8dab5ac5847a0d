"""Sections with a `_component_`: built where that touches nothing, else held against what the component takes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.checkpoints.loading import KEEP_LAST, finds_files_itself
from torchtune_adaptive.checkpoints.named import file_names
from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.components import build_ppo_loss
from torchtune_adaptive.rl.prompt_room import check_room
from torchtune_adaptive.rl.settings import (
    REFERENCE_FILES,
    REWARD_FILES,
    VALUE_FILES,
    VALUE_SECTION,
    read_ppo_settings,
)
from torchtune_adaptive.tune.data import PAIRS_ARE_NOT_PACKED, build_collate, is_packed
from torchtune_adaptive.tune.finetuning import checked_loss
from torchtune_adaptive.tune.metrics import profiler_is_enabled
from torchtune_adaptive.tune.model import META, built_on
from torchtune_adaptive.tune.preference import build_preference_loss
from torchtune_adaptive.tune.validate.findings import Findings

T = TypeVar("T")

SOME_STEPS = 100
"""Steps of an imaginary run, since the dataset is not read here."""


def check_components(cfg: DictConfig, findings: Findings, of_its_own: Callable[[], None]) -> nn.Module | None:
    """All of them; returns the model, on the meta device. `of_its_own` checks the loss, and what only one kind of
    recipe has."""
    model = findings.collect(lambda: _with_what_is_installed(lambda: build_model(cfg), "model", cfg, findings))
    tokenizer = partial(check_tokenizer, cfg, findings)
    findings.collect(lambda: _with_what_is_installed(tokenizer, "tokenizer", cfg, findings))
    findings.collect(lambda: check_dataset(cfg))
    findings.collect(of_its_own)
    findings.collect(lambda: check_optimization(cfg, findings))
    findings.collect(lambda: check_fits("metric_logger", components.require(cfg, "metric_logger")))
    findings.collect(lambda: check_profiler(cfg))
    findings.collect(lambda: check_checkpointer(cfg))
    return model


def _quantizing_at_once() -> AbstractContextManager[None]:
    """While open, weights in NF4 are not looked up a million at a time: without data only their number counts."""

    def pairs_of(weight: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.empty(weight.numel() // 2, dtype=torch.uint8, device=weight.device)

    return patch.multiple(NF4Tensor, convert_to_norm_float_weight=staticmethod(pairs_of))


def build_model(cfg: DictConfig) -> nn.Module:
    with _quantizing_at_once(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong with a size is told by its key
        return built_on(META, cfg, torch.float32)


def check_tokenizer(cfg: DictConfig, findings: Findings) -> None:
    section = components.require(cfg, "tokenizer")
    missing = [(str(key), value) for key, value in section.items() if _is_path(key, value) and not Path(value).exists()]
    for key, value in missing:
        findings.note_missing_here(
            f"tokenizer.{key} is {value!r}, which does not exist: download it first (tune download) or correct the path"
        )
    if missing:
        check_fits("tokenizer", section)
    else:
        components.build("tokenizer", cfg)


def _is_path(key: object, value: object) -> bool:
    return key != COMPONENT and isinstance(value, str) and os.sep in value


def check_dataset(cfg: DictConfig) -> None:
    """Without its samples, which may have to come over the network."""
    section = components.require_parts(cfg, "dataset")
    if not isinstance(section, ListConfig):
        check_fits("dataset", section, None)
        return
    for at, part in enumerate(section):
        check_fits(f"dataset[{at}]", part, None)


def check_loss(cfg: DictConfig, settings: Settings | None) -> None:
    """Checks the loss and the collate function, which is given the label that the loss ignores."""
    loss = checked_loss(cfg)
    if settings is not None and not is_packed(cfg):
        build_collate(settings, SimpleNamespace(pad_id=0), cast(int, loss.ignore_index), packed=False)


def check_pairs(cfg: DictConfig) -> None:
    """What preference training has of its own."""
    if is_packed(cfg):
        raise ConfigError(PAIRS_ARE_NOT_PACKED)
    build_preference_loss(cfg)
    if cfg.get("ref_checkpointer") is not None:
        check_fits("ref_checkpointer", cfg.ref_checkpointer, should_load_recipe_state=False)


def check_rollouts(settings: Settings) -> None:
    """What PPO has of its own, with the weights of its other models."""
    build_ppo_loss(settings)
    for key in (REFERENCE_FILES, VALUE_FILES, REWARD_FILES):
        check_fits(key, components.require(settings.config, key), should_load_recipe_state=False)


def check_models_of_ppo(settings: Settings, policy: nn.Module | None) -> nn.Module:
    """What is not the policy, and whether beside an answer there is room for a prompt in all of them; returns it."""
    value = built_on(META, settings.config, torch.float32, VALUE_SECTION)
    if policy is not None:
        check_room((policy, value), settings.adaptive, read_ppo_settings(settings.config)[1])
    return value


def check_optimizer(cfg: DictConfig, findings: Findings) -> torch.optim.Optimizer | None:
    """The optimizer of one parameter; None where only another machine can build it."""
    try:
        optimizer: torch.optim.Optimizer = components.build("optimizer", cfg, [nn.Parameter(torch.zeros(1))])
    except ConfigError as error:
        if torch.cuda.is_available() or "cuda" not in str(error.__cause__).lower():
            raise
        findings.note_missing_here(str(error))
        return None
    return optimizer


def check_optimization(cfg: DictConfig, findings: Findings) -> None:
    """The optimizer, and its schedule."""
    optimizer = check_optimizer(cfg, findings)
    if optimizer is not None and cfg.get("lr_scheduler") is not None:
        components.build("lr_scheduler", cfg, optimizer, num_training_steps=SOME_STEPS, last_epoch=-1)


def check_profiler(cfg: DictConfig) -> None:
    section = cfg.get("profiler")
    if section is not None and profiler_is_enabled(section):
        check_fits("profiler", section)


def check_checkpointer(cfg: DictConfig) -> None:
    section = components.require(cfg, "checkpointer")
    kept = [str(key) for key in section if key != KEEP_LAST]
    check_fits("checkpointer", OmegaConf.masked_copy(section, kept), should_load_recipe_state=False)
    if "checkpoint_files" in section or finds_files_itself(section):
        file_names(section.get("checkpoint_files"))
    kind = section.get("model_type")
    if isinstance(kind, str) and kind not in (known := training.ModelType.__members__):
        raise ConfigError(f"checkpointer.model_type is {kind!r}: allowed is {', '.join(known)}")


def check_fits(key: str, section: Any, *args: object, **kwargs: object) -> None:
    """Refuses a component that cannot be imported, or that does not take what its section gives it."""
    path = components.path_of(key, section)
    try:
        _get_component_from_path(path)
    except Exception as error:
        raise ConfigError(
            f"{key}.{COMPONENT} is {path!r}, which cannot be imported: {components.in_a_line(error)}"
        ) from (error)
    if wrong := components.misfit(key, section, args, kwargs):
        raise ConfigError(wrong)


def _with_what_is_installed(work: Callable[[], T], key: str, cfg: DictConfig, findings: Findings) -> T | None:
    """What the work returns; a package that a component needs, and that is not its own, may be there elsewhere."""
    try:
        return work()
    except ConfigError as error:
        cause, section = _first_cause(error), cfg.get(key)
        path = str(section.get(COMPONENT)) if isinstance(section, DictConfig) else ""
        package = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if package is None or package.split(".")[0] == path.split(".")[0]:
            raise
        findings.note_missing_here(f"{key} needs {package}, which is not installed: pip install {package}")
        return None


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
