"""A config checked as a run would check it, in the same order, on a machine that need not be able to train it.

Sections with a `_component_` are built where that touches nothing, else held against what the component takes.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
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

from torchtune_adaptive.checkpoints.loading import (
    KEEP_LAST,
    check_what_saves_copy,
    finds_files_itself,
    missing_directory,
)
from torchtune_adaptive.checkpoints.named import file_names
from torchtune_adaptive.checkpoints.progress import start_progress
from torchtune_adaptive.checkpoints.resuming import checkpoint_directory, choose, places_of
from torchtune_adaptive.checkpoints.store import find_checkpoints
from torchtune_adaptive.config import components
from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings, read_adaptive, value_at
from torchtune_adaptive.config.registry import GRPO, PLAN, PPO, Recipe
from torchtune_adaptive.config.remedies import in_keys
from torchtune_adaptive.engine.search import NEED_RECOVERY
from torchtune_adaptive.errors import AdaptiveError, ConfigError, RunFinished, SeveralErrors
from torchtune_adaptive.forecast.question import read_question
from torchtune_adaptive.life.output_lock import holder, in_use, unwritable
from torchtune_adaptive.rl.grpo import REFERENCE_FILES as GRPO_REFERENCE
from torchtune_adaptive.rl.limits import check_room
from torchtune_adaptive.rl.ppo import build_ppo_loss
from torchtune_adaptive.rl.rewards import functions_of
from torchtune_adaptive.rl.settings import REFERENCE_FILES, REWARD_FILES, VALUE_FILES, VALUE_SECTION, PPOSettings
from torchtune_adaptive.text import size_for_rank
from torchtune_adaptive.tune import place
from torchtune_adaptive.tune.data import PAIRS_ARE_NOT_PACKED, build_collate, is_packed
from torchtune_adaptive.tune.dealing import obstacle_to_dealing
from torchtune_adaptive.tune.finetuning import check_cuts, check_sequence_length, checked_loss, obstacle_to_recovery
from torchtune_adaptive.tune.metrics import profiler_is_enabled
from torchtune_adaptive.tune.model import META, built_on, check_replicas_of
from torchtune_adaptive.tune.preference import build_preference_loss
from torchtune_adaptive.tune.schedule import build_increase_function, check_growth
from torchtune_adaptive.tune.unpadded import is_padded

Value = TypeVar("Value")

SOME_STEPS = 100
"""Steps of an imaginary run, since the dataset is not read here."""


class Findings:
    """What a run would refuse, all of it, and what only the machine can tell on which it will run."""

    def __init__(self, *, here: bool) -> None:
        self.wrong: dict[str, None] = {}
        """In the order in which they were met, each once: two checks may find the same."""
        self.notes: list[str] = []
        self._here = here

    def collect(self, check: Callable[..., Value], *args: Any, **kwargs: Any) -> Value | None:
        """What the check returns; None where a run would end, which is noted."""
        try:
            return check(*args, **kwargs)
        except AdaptiveError as error:
            self.wrong |= dict.fromkeys(map(in_keys, error.errors if isinstance(error, SeveralErrors) else [error]))
        except RunFinished as finished:
            self.notes.append(str(finished))
        return None

    def note_missing_here(self, missing: str) -> None:
        """What this machine lacks: wrong if it is the one that the run will be on."""
        if self._here:
            self.wrong[missing] = None
        else:
            self.notes.append(f"on this machine: {missing}")

    @contextmanager
    def noting_packages(self, key: str, cfg: DictConfig) -> Iterator[None]:
        """Around building a component: a package that it needs, and that is not its own, may be installed elsewhere."""
        try:
            yield
        except ConfigError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            package = cause.name if isinstance(cause, ModuleNotFoundError) else None
            if package is None or package.split(".")[0] == str(value_at(cfg, f"{key}.{COMPONENT}")).split(".")[0]:
                raise
            self.note_missing_here(f"{key} needs {package}, which is not installed: pip install {package}")


def check_config(cfg: DictConfig, recipe: Recipe, ranks: int | None, *, here: bool) -> Findings:
    """`ranks`: None where it is not known yet. `here`: this is the machine on which it will run."""
    findings = Findings(here=here)
    findings.collect(check_keys, cfg, recipe.keys, aloud=True)
    if recipe is PLAN:
        findings.collect(read_question, cfg, "", ())
        return findings
    settings: Settings | None
    own: Any
    settings, own = findings.collect(recipe.read, cfg) or (None, None)
    if settings is None and findings.collect(read_adaptive, cfg.get("adaptive")) is None:
        # a mistake in `adaptive:` hides no contradiction besides
        findings.collect(recipe.read, OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "adaptive"]))
    if settings is not None:
        cfg = settings.config  # where PPO's policy is what the others call the model
    elif recipe is PPO:
        return findings

    model = _check_components(cfg, settings, findings)
    if recipe is PPO and settings is not None:
        _check_ppo(settings, own, ranks or 1, model, findings)
    elif recipe is GRPO:
        _check_grpo(cfg, settings, own, model, findings)
    else:
        findings.collect(_check_pairs if recipe.of_pairs else _check_loss, cfg, settings, model)
    if settings is not None:
        _check_together(settings, model, ranks, findings)
        findings.collect(_check_device, settings, findings)
        findings.collect(_check_weights, cfg, findings)
        findings.collect(_check_output, settings, recipe.saved_as, findings)
    return findings


def _check_components(cfg: DictConfig, settings: Settings | None, findings: Findings) -> nn.Module | None:
    """All that every recipe has; returns the model, on the meta device."""
    model = findings.collect(_build_model, cfg, findings)
    findings.collect(_check_tokenizer, cfg, findings)
    findings.collect(_check_dataset, cfg, findings)
    findings.collect(_check_optimizer, cfg, findings)
    findings.collect(lambda: check_fits("metric_logger", components.require(cfg, "metric_logger")))
    profiler = cfg.get("profiler")
    if profiler is not None and findings.collect(profiler_is_enabled, profiler):
        findings.collect(check_fits, "profiler", profiler)
    findings.collect(_check_checkpointer, cfg)
    if settings is None:
        findings.collect(build_increase_function, cfg)
    else:
        findings.collect(check_growth, settings)
    return model


def _build_model(cfg: DictConfig, findings: Findings) -> nn.Module | None:
    def pairs_of(weight: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.empty(weight.numel() // 2, dtype=torch.uint8, device=weight.device)

    # Weights in NF4 are not looked up a million at a time: without data only their number counts.
    at_once = patch.multiple(NF4Tensor, convert_to_norm_float_weight=staticmethod(pairs_of))
    with findings.noting_packages("model", cfg), at_once, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong with a size is told by its key
        return built_on(META, cfg, torch.float32)


def _check_tokenizer(cfg: DictConfig, findings: Findings) -> None:
    section = components.require(cfg, "tokenizer")
    paths = {str(key): value for key, value in section.items() if key != COMPONENT and os.sep in str(value)}
    missing = {key: path for key, path in paths.items() if not Path(path).exists()}
    for key, path in missing.items():
        findings.note_missing_here(
            f"tokenizer.{key} is {path!r}, which does not exist: download it first (tune download) or correct the path"
        )
    with findings.noting_packages("tokenizer", cfg):
        if missing:
            check_fits("tokenizer", section)
        else:
            components.build("tokenizer", cfg)


def _check_dataset(cfg: DictConfig, findings: Findings) -> None:
    """Without its samples, which may have to come over the network."""
    section = components.require_parts(cfg, "dataset")
    several = isinstance(section, ListConfig)
    for at, part in enumerate(section if several else [section]):
        key = f"dataset[{at}]" if several else "dataset"
        check_fits(key, part, None)
        files = part.get("data_files")
        for file in [files] if isinstance(files, str) else list(files or ()):  # of a section by split, its names
            path = str(files[file] if isinstance(files, DictConfig) else file)
            if "://" not in path and not glob(path):
                findings.note_missing_here(f"{key}.data_files is {path!r}, which does not exist: correct the path")


def _check_optimizer(cfg: DictConfig, findings: Findings) -> None:
    """With its schedule, on one parameter."""
    try:
        optimizer = components.build("optimizer", cfg, [nn.Parameter(torch.zeros(1))])
    except ConfigError as error:
        if torch.cuda.is_available() or "cuda" not in str(error.__cause__).lower():
            raise
        findings.note_missing_here(str(error))
        return
    if cfg.get("lr_scheduler") is not None:
        components.build("lr_scheduler", cfg, optimizer, num_training_steps=SOME_STEPS, last_epoch=-1)


def _check_checkpointer(cfg: DictConfig) -> None:
    section = components.require(cfg, "checkpointer")
    others = [str(key) for key in section if key != KEEP_LAST]
    check_fits("checkpointer", OmegaConf.masked_copy(section, others), should_load_recipe_state=False)
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
        reason = components.in_a_line(error)
        raise ConfigError(f"{key}.{COMPONENT} is {path!r}, which cannot be imported: {reason}") from error
    if wrong := components.misfit(key, section, args, kwargs):
        raise ConfigError(wrong)


def _check_loss(cfg: DictConfig, settings: Settings | None, model: nn.Module | None) -> None:
    """With the collate function, which is given the label that the loss ignores."""
    loss = checked_loss(cfg)
    if settings is not None and not is_packed(cfg):
        build_collate(settings, SimpleNamespace(pad_id=0), cast(int, loss.ignore_index), packed=False)
    if model is not None:
        check_cuts(loss, model)


def _check_pairs(cfg: DictConfig, *_: object) -> None:
    if is_packed(cfg):
        raise ConfigError(PAIRS_ARE_NOT_PACKED)
    build_preference_loss(cfg)
    if cfg.get("ref_checkpointer") is not None:
        check_fits("ref_checkpointer", cfg.ref_checkpointer, should_load_recipe_state=False)


def _check_ppo(settings: Settings, ppo: PPOSettings, ranks: int, policy: nn.Module | None, findings: Findings) -> None:
    """What PPO has of its own, and whether there is room for a prompt beside an answer in all of its models."""
    cfg = settings.config
    findings.collect(build_ppo_loss, settings)
    for key in (REFERENCE_FILES, VALUE_FILES, REWARD_FILES):
        section = findings.collect(components.require, cfg, key)
        if section is not None:
            findings.collect(check_fits, key, section, should_load_recipe_state=False)
    value = findings.collect(built_on, META, cfg, torch.float32, VALUE_SECTION)
    if policy is not None and value is not None:
        findings.collect(check_room, (policy, value), settings.adaptive, ppo.max_generated_tokens)
    findings.collect(ppo.iterations, ranks)


def _check_grpo(
    cfg: DictConfig, settings: Settings | None, own: Any, policy: nn.Module | None, findings: Findings
) -> None:
    """What GRPO has of its own, and whether there is room for a prompt beside an answer."""
    findings.collect(functions_of, cfg)
    if cfg.get(GRPO_REFERENCE) is not None:
        findings.collect(check_fits, GRPO_REFERENCE, cfg.get(GRPO_REFERENCE), should_load_recipe_state=False)
    if settings is not None and policy is not None:
        findings.collect(check_room, [policy], settings.adaptive, own[0].max_generated_tokens)


def _check_together(settings: Settings, model: nn.Module | None, ranks: int | None, findings: Findings) -> None:
    """Values that are well each by itself."""
    findings.collect(_check_search, settings)
    findings.collect(start_progress, settings, ranks=1)
    device, packed = findings.collect(place.device_named, settings), is_packed(settings.config)
    if model is not None:
        findings.collect(check_sequence_length, model, settings.adaptive)
        findings.collect(check_replicas_of, model, settings)
        findings.collect(obstacle_to_dealing, model, settings, packed=packed)
        if device is not None:
            findings.collect(is_padded, model, settings, device, packed=packed)
    if ranks is not None:
        findings.collect(place.mesh_shape, settings, ranks)
        if (limits := settings.adaptive.memory_limit) is not None:
            findings.collect(size_for_rank, limits, 0, ranks, "adaptive.memory_limit")


def _check_search(settings: Settings) -> None:
    search, recover = settings.adaptive.search, settings.adaptive.recover_from_oom
    obstacle = obstacle_to_recovery(settings)
    why = "adaptive.recover_from_oom is False" if recover is False else obstacle
    if settings.use_maximum_batch_size and search in NEED_RECOVERY and why is not None:
        raise ConfigError(
            f"adaptive.search is {search}, which runs out of memory on purpose, but {why}: set adaptive.search: linear"
        )


def _check_device(settings: Settings, findings: Findings) -> None:
    try:
        place.dtype_of(settings, place.device_of(settings))
    except ConfigError as error:
        findings.note_missing_here(str(error))


def _check_weights(cfg: DictConfig, findings: Findings) -> None:
    section = components.require(cfg, "checkpointer")
    if (problem := missing_directory(section)) is not None:
        findings.note_missing_here(problem)
        return
    if not finds_files_itself(section):
        return
    check_what_saves_copy(section)
    folder = Path(section.checkpoint_dir)
    missing = [name for name in file_names(section.get("checkpoint_files")) if not (folder / name).is_file()]
    if missing and not cfg.get("resume_from_checkpoint"):  # then they are looked for in output_dir, too
        findings.note_missing_here(
            f"checkpointer.checkpoint_files: {len(missing)} missing from {folder}, first: {missing[0]}; download them, "
            "or correct the names"
        )


def _check_output(settings: Settings, recipe: str, findings: Findings) -> None:
    """What is in the folder for checkpoints, as a run would find it. Nothing is left behind in it."""
    for folder in places_of(settings):
        existing = next(one for one in (folder, *folder.parents) if one.exists())
        try:
            with tempfile.TemporaryDirectory(dir=existing):
                pass
        except OSError as error:
            findings.note_missing_here(str(unwritable(folder, error)))
        if (who := holder(folder)) is not None:
            raise in_use(folder, who)
    with suppress(RunFinished):
        choose(settings, recipe, find_checkpoints(checkpoint_directory(settings)))
