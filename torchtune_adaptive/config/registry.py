"""The recipes of this package and of torchtune, and the names of their configs.

This module reads torchtune's registry from its file. It imports neither torch nor torchtune, so that `ls` is fast.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import did_you_mean

PREFIX = "adaptive/"
RUN = re.compile(r"^(#.*\btune run\b.*?)(\w+) --config \S+", re.MULTILINE)
"""Finds the `tune run` command in the comments of a config, and the recipe in it."""


FULL, LORA = "adaptive_full_finetune_distributed", "adaptive_lora_finetune_distributed"
FULL_DPO, LORA_DPO = "adaptive_full_dpo_distributed", "adaptive_lora_dpo_distributed"
PPO = "adaptive_ppo_full_finetune_distributed"
RECIPES: Mapping[str, str] = {
    **{name: name.removeprefix("adaptive_") for name in (FULL, LORA, FULL_DPO, LORA_DPO)},
    PPO: "ppo_full_finetune_single_device",
}
"""The recipes of this package, and the recipe of torchtune that each replaces."""


class NamedConfig(NamedTuple):
    """A config, its name, and its recipe."""

    recipe: str
    name: str
    path: Path


def our_configs() -> list[NamedConfig]:
    """Return the configs of this package. The recipe of a config is the one in its comments."""
    root = Path(str(resources.files("torchtune_adaptive.configs")))
    configs = []
    for path in sorted(root.rglob("*.yaml")):
        command = RUN.search(path.read_text(encoding="utf-8", errors="replace"))
        name = PREFIX + path.relative_to(root).with_suffix("").as_posix()
        configs.append(NamedConfig(command[2] if command else "", name, path))
    return configs


def stock_configs() -> list[NamedConfig]:
    """Return the configs of torchtune, once for each of torchtune's recipes that accepts them."""
    return [
        NamedConfig(recipe.name, config.name, stock_folder() / "recipes" / "configs" / config.file_path)
        for recipe in _stock_recipes()
        for config in recipe.configs
    ]


def supported_configs() -> Iterator[NamedConfig]:
    """Yield the configs of each adaptive recipe: first those of this package, then torchtune's."""
    ours, stock = our_configs(), stock_configs()
    for recipe, stock_recipe in RECIPES.items():
        yield from (config for config in ours if config.recipe == recipe)
        if recipe != PPO:  # torchtune's PPO configs need changes; an error lists them
            yield from (each._replace(recipe=recipe) for each in stock if each.recipe == stock_recipe)


def recipe_files() -> dict[str, Path]:
    """Return the files of all recipes by name."""
    ours = {name: importlib.util.find_spec(name) for name in RECIPES}
    files = {name: Path(spec.origin) for name, spec in ours.items() if spec is not None and spec.origin}
    return files | {recipe.name: stock_folder() / "recipes" / recipe.file_path for recipe in _stock_recipes()}


def config_files() -> dict[str, Path]:
    """Return the files of all configs by name."""
    return {config.name: config.path for config in (*our_configs(), *stock_configs())}


def file_named(name: str, known: Mapping[str, Path], what: str, option: str = "") -> Path:
    """Return the file of a known name, or `name` if it is the path of a file. `what` and `option` are for the error."""
    if name in known:
        return known[name]
    if not name.startswith(PREFIX) and os.path.isfile(name):
        return Path(name)
    suggestion = did_you_mean(name.removesuffix(".yaml"), known, most=4, likeness=0.5)
    hint = suggestion or "; tune-adaptive ls lists all names"
    raise ConfigError(f"{option}{name} is neither a file nor a known {what}{hint}")


@cache
def stock_folder() -> Path:
    """Return the folder that contains the packages `torchtune` and `recipes`, without importing torchtune."""
    spec = importlib.util.find_spec("torchtune")
    if spec is None:
        raise ModuleNotFoundError("No module named 'torchtune'", name="torchtune")
    return Path(str(spec.origin)).parents[1]


@cache
def _stock_recipes() -> list[Any]:
    """Return torchtune's recipes, each with `name`, `file_path` and `configs`; a config has the first two as well."""
    recipes: list[Any] = runpy.run_path(str(stock_folder() / "torchtune" / "_recipe_registry.py"))["get_all_recipes"]()
    return recipes
