"""The recipes, ours and torchtune's, and the configs that have a name.

Nothing here imports torch or torchtune, so that names are listed at once: torchtune's own list is read from its file.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import re
import runpy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from torchtune_adaptive.config.keys import Settings

PREFIX = "adaptive/"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)B")
_STARTED_WITH = re.compile(r"^#.*\btune run\b(?P<flags>.*?)(?P<recipe>\w+) --config", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """A recipe of ours, as `ls`, `validate`, a forecast and a resumed run see it."""

    name: str
    takes: str | None
    """torchtune's recipe in whose place it is, if any. None: it trains nothing, and takes the configs of all others."""
    saved_as: str = ""
    """What the manifest of a checkpoint calls the recipe that wrote it."""
    reader: str = ""
    """The function that reads its settings, which may be a pair: those of every recipe, and its own."""
    own_keys: str = ""
    """Where the keys stand that only this recipe has."""

    def read(self, cfg: DictConfig) -> tuple[Settings, Any]:
        """Its settings, those of every recipe and its own; refuses what they contradict."""
        settings = pkgutil.resolve_name(self.reader)(cfg)
        return settings if isinstance(settings, tuple) else (settings, None)

    @property
    def keys(self) -> Collection[str]:
        return pkgutil.resolve_name(self.own_keys) if self.own_keys else ()


CHECKS = "torchtune_adaptive.config.checks"
RL = "torchtune_adaptive.rl.settings"
FULL = Recipe("adaptive_full_finetune_distributed", "full_finetune_distributed", "full", f"{CHECKS}:read_full_settings")
LORA = Recipe("adaptive_lora_finetune_distributed", "lora_finetune_distributed", "lora", f"{CHECKS}:read_lora_settings")
FULL_DPO = Recipe(
    "adaptive_full_dpo_distributed", "full_dpo_distributed", "full_dpo", f"{CHECKS}:read_full_dpo_settings"
)
LORA_DPO = Recipe(
    "adaptive_lora_dpo_distributed", "lora_dpo_distributed", "lora_dpo", f"{CHECKS}:read_lora_dpo_settings"
)
PPO = Recipe(
    "adaptive_ppo_full_finetune_distributed",
    "ppo_full_finetune_single_device",
    "full_ppo",
    f"{RL}:read_ppo_settings",
    f"{RL}:PPO_KEYS",
)
GRPO = Recipe(
    "adaptive_grpo_full_finetune_distributed",
    "grpo_full_finetune_distributed",
    "full_grpo",
    f"{RL}:read_grpo_settings",
    f"{RL}:GRPO_KEYS",
)
GRPO_LORA = Recipe(
    "adaptive_grpo_lora_finetune_distributed", "", "lora_grpo", f"{RL}:read_grpo_lora_settings", f"{RL}:GRPO_KEYS"
)
PLAN = Recipe("adaptive_plan", None, own_keys="torchtune_adaptive.forecast.question:PLAN_KEYS")
RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe for recipe in (FULL, LORA, FULL_DPO, LORA_DPO, PPO, GRPO, GRPO_LORA, PLAN)
}
SIGNS = {"grpo_samples": (GRPO, GRPO_LORA), "ppo_batch_size": (PPO, PPO), "loss.DPOLoss": (FULL_DPO, LORA_DPO)}
"""What a config has that is not for finetuning, and the recipes that take it: of all weights, and of adapters."""


@dataclass(frozen=True)
class Listed:
    """A config that has a name, and the recipe that it is for."""

    recipe: str
    name: str
    path: Path


def our_configs() -> list[Listed]:
    """Every config that comes with this package, 7B before 32B; its comments name its recipe."""

    def folder_and_size(path: Path) -> tuple[Path, float, str]:
        size = _SIZE.match(path.stem)
        return path.parent, float(size[1]) if size else 0.0, path.stem

    root = Path(str(resources.files("torchtune_adaptive.configs")))
    return [
        Listed(started_with(path)[1] or "", PREFIX + path.relative_to(root).with_suffix("").as_posix(), path)
        for path in sorted(root.rglob("*.yaml"), key=folder_and_size)
    ]


def stock_configs() -> list[Listed]:
    """Every config that comes with torchtune, once for each of its recipes that takes it."""
    return [
        Listed(recipe.name, config.name, stock_folder() / "recipes" / "configs" / config.file_path)
        for recipe in _stock_recipes()
        for config in recipe.configs
    ]


def taken_by_ours() -> Iterator[Listed]:
    """Every config that a recipe of ours takes: ours, then torchtune's, by recipe."""
    ours, stock = our_configs(), stock_configs()
    for recipe in RECIPES.values():
        yield from (config for config in ours if config.recipe == recipe.name)
        if recipe is not PPO:  # of whose configs, torchtune's, an error names the lines to change
            yield from (Listed(recipe.name, one.name, one.path) for one in stock if one.recipe == recipe.takes)


def recipe_files() -> dict[str, Path]:
    ours = {name: importlib.util.find_spec(name) for name in RECIPES}
    files = {name: Path(spec.origin) for name, spec in ours.items() if spec is not None and spec.origin}
    return files | {recipe.name: stock_folder() / "recipes" / recipe.file_path for recipe in _stock_recipes()}


def config_files() -> dict[str, Path]:
    return {config.name: config.path for config in (*our_configs(), *stock_configs())}


def started_with(config: Path) -> tuple[str, str | None]:
    """What a file's comments give to the launcher, and the recipe that they start, ours in place of torchtune's."""
    command = _STARTED_WITH.search(config.read_text(encoding="utf-8", errors="replace"))
    if command is None:
        return "", None
    ours = {recipe.takes: name for name, recipe in RECIPES.items()}
    return command["flags"].strip(), ours.get(command["recipe"], command["recipe"])


def recipe_for(name: str) -> str | None:
    """The recipe that a config of this name is for, ours where there is one; None: a path does not say."""
    return next((config.recipe for config in (*taken_by_ours(), *stock_configs()) if config.name == name), None)


def file_of(name: str) -> Path:
    """The file of a config, of a recipe, or at a path."""
    return file_named(name, config_files() | recipe_files(), "config or recipe")


def config_of(name: str) -> Path:
    """The file of a config, by its name or its path."""
    if name in recipe_files():
        raise ConfigError(f"{name} is a recipe: use one of its configs (tune-adaptive ls {name})")
    return file_named(name, config_files(), "config")


def file_named(name: str, known: Mapping[str, Path], what: str, option: str = "") -> Path:
    """The file of one of the known names, or at a path; `option` is where it was given."""
    if name in known:
        return known[name]
    if not name.startswith(PREFIX) and os.path.isfile(name):
        return Path(name)
    near = did_you_mean(name.removesuffix(".yaml"), known, most=4, likeness=0.5)
    hint = near or "; tune-adaptive ls lists all names"
    raise ConfigError(f"{option}{name} is neither a file nor a known {what}{hint}")


@cache
def stock_folder() -> Path:
    """Return the folder that contains torchtune and its recipes, without importing torchtune."""
    spec = importlib.util.find_spec("torchtune")
    if spec is None:
        raise ModuleNotFoundError("No module named 'torchtune'", name="torchtune")
    return Path(str(spec.origin)).parents[1]


@cache
def _stock_recipes() -> list[Any]:
    """torchtune's own list: recipes with a name, a file_path and configs that have both, too."""
    recipes: list[Any] = runpy.run_path(str(stock_folder() / "torchtune" / "_recipe_registry.py"))["get_all_recipes"]()
    return recipes
