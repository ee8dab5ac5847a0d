"""The recipes and configs that have a name: ours, and torchtune's.

torchtune's list of its own is read from its file: to import torchtune takes seconds, and to list names takes none.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Protocol

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import did_you_mean

PREFIX = "adaptive/"
FULL, LORA, PLAN = "adaptive_full_finetune_distributed", "adaptive_lora_finetune_distributed", "adaptive_plan"
FULL_DPO, LORA_DPO = "adaptive_full_dpo_distributed", "adaptive_lora_dpo_distributed"
PPO = "adaptive_ppo_full_finetune_distributed"
RECIPES: Mapping[str, str | None] = {
    FULL: "full_finetune_distributed",
    LORA: "lora_finetune_distributed",
    FULL_DPO: "full_dpo_distributed",
    LORA_DPO: "lora_dpo_distributed",
    PPO: "ppo_full_finetune_single_device",
    PLAN: None,
}
"""Our recipes, each with the one of torchtune's whose configs it takes unchanged. None: it trains nothing itself, and
takes the configs of all others."""
CHANGED = (PPO,)
"""Recipes whose counterpart has configs that cannot work on several devices as they are; an error names the lines."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)B")
_STARTED_WITH = re.compile(r"^#.*\btune run\b(?P<flags>.*?)(?P<recipe>\w+) --config", re.MULTILINE)


class _StockConfig(Protocol):
    name: str
    file_path: str


class _StockRecipe(Protocol):
    """An entry of torchtune's own list."""

    name: str
    file_path: str
    configs: list[_StockConfig]


@dataclass(frozen=True)
class Listed:
    """A config that has a name, and the recipe that it is for."""

    recipe: str
    name: str
    path: Path


def our_configs() -> tuple[Listed, ...]:
    """Every config that comes with this package; the comment that it begins with says how it is started."""
    return tuple(Listed(recipe_of(path) or "", name, path) for name, path in installed_configs().items())


def installed_configs() -> dict[str, Path]:
    """Name -> file of every config that comes with this package."""
    root = Path(str(resources.files("torchtune_adaptive.configs")))
    files = sorted(root.rglob("*.yaml"), key=lambda path: (path.parent, _by_size(path.stem)))
    return {PREFIX + path.relative_to(root).with_suffix("").as_posix(): path for path in files}


def _by_size(name: str) -> tuple[float, str]:
    """Sorts 7B before 32B, and what has no size before both."""
    size = _SIZE.match(name)
    return (float(size[1]) if size else 0.0, name)


def stock_configs() -> tuple[Listed, ...]:
    """Every config that comes with torchtune, once for each of its recipes that takes it."""
    folder = _stock_folder() / "configs"
    return tuple(
        Listed(recipe.name, each.name, folder / each.file_path) for recipe in _registry() for each in recipe.configs
    )


def taken_by_ours() -> Iterator[Listed]:
    """Every config that a recipe of ours takes: ours, then torchtune's, by recipe."""
    ours, stock = our_configs(), stock_configs()
    for recipe, counterpart in RECIPES.items():
        yield from (each for each in ours if each.recipe == recipe)
        if recipe not in CHANGED:
            yield from (Listed(recipe, each.name, each.path) for each in stock if each.recipe == counterpart)


def recipe_files() -> dict[str, Path]:
    """Name -> file of every recipe, ours and torchtune's."""
    ours = {name: importlib.util.find_spec(name) for name in RECIPES}
    files = {name: Path(spec.origin) for name, spec in ours.items() if spec is not None and spec.origin}
    return files | {recipe.name: _stock_folder() / recipe.file_path for recipe in _registry()}


def config_files() -> dict[str, Path]:
    """Name -> file of every config, ours and torchtune's."""
    return installed_configs() | {each.name: each.path for each in stock_configs()}


def recipe_of(config: Path) -> str | None:
    """The recipe that a file's own comments start it with, ours in place of torchtune's; None where they do not say."""
    found = _STARTED_WITH.search(config.read_text(encoding="utf-8", errors="replace"))
    ours = {stock: recipe for recipe, stock in RECIPES.items() if stock is not None}
    return ours.get(found["recipe"], found["recipe"]) if found else None


def flags_of(config: Path) -> str:
    """What those comments give to the launcher: `--nproc_per_node 8`; nothing where they do not say."""
    found = _STARTED_WITH.search(config.read_text(encoding="utf-8", errors="replace"))
    return found["flags"].strip() if found else ""


def file_named(name: str, known: Mapping[str, Path], what: str, option: str = "") -> Path:
    """The file of one of the known names, or at a path; `option` is where it was given."""
    if name in known:
        return known[name]
    if not name.startswith(PREFIX) and Path(name).is_file():
        return Path(name)
    raise ConfigError(f"{option}{name} is neither a file nor a known {what}{near_names(name, known)}")


def near_names(name: str, known: Iterable[str]) -> str:
    """The names that somebody may have meant, for the end of a message."""
    near = did_you_mean(name.removesuffix(".yaml"), known, most=4, likeness=0.5)
    return near or "; tune-adaptive ls lists all names"


def _torchtune() -> Path:
    """The folder of its package; asking for a module in it would import it."""
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _stock_folder() -> Path:
    return _torchtune().parent / "recipes"


@cache
def _registry() -> list[_StockRecipe]:
    recipes: list[_StockRecipe] = runpy.run_path(str(_torchtune() / "_recipe_registry.py"))["get_all_recipes"]()
    return recipes
