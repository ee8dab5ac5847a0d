"""Names of configs and recipes on the command line."""

from __future__ import annotations

from pathlib import Path

from torchtune_adaptive.config.registry import (
    config_files,
    file_named,
    recipe_files,
    stock_configs,
    taken_by_ours,
)
from torchtune_adaptive.errors import ConfigError


def file_of(name: str) -> Path:
    """The file of a config, of a recipe, or at a path."""
    return file_named(name, config_files() | recipe_files(), "config or recipe")


def config_of(name: str) -> Path:
    """The file of a config, by its name or its path."""
    if name in recipe_files():
        raise ConfigError(f"{name} is a recipe: use one of its configs (tune-adaptive ls {name})")
    return file_named(name, config_files(), "config")


def recipe_for(name: str) -> str | None:
    """The recipe that a config of this name is for, ours where there is one; None: a path does not say."""
    return next((each.recipe for each in (*taken_by_ours(), *stock_configs()) if each.name == name), None)
