"""List the recipes and their configs: ours, named adaptive/..., and torchtune's.

Words filter the list: tune-adaptive ls qwen2_5 lora
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torchtune_adaptive.config.registry import RECIPES, stock_configs, taken_by_ours
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import did_you_mean

HEADING = ("RECIPE", "CONFIG")
ANY_OF_THEM = "<any config for finetuning, preference training or PPO, except images and tensor parallelism>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="word", help="show only lines that contain all of these words")
    parser.add_argument("--all", action="store_true", help="also list torchtune's own recipes")


def run(options: argparse.Namespace) -> int:
    everything = listed(all_recipes=options.all)
    found = [line for line in everything if all(word in " ".join(line) for word in options.words)]
    if not found:
        raise ConfigError(_no_match(options.words, everything))
    width = max(len(recipe) for recipe, _ in everything)
    print("\n".join(f"{recipe:{width}}  {config}" for recipe, config in [HEADING, *found]))
    return 0


def listed(*, all_recipes: bool) -> list[tuple[str, str]]:
    """Recipe and config, of every line."""
    for_any = [(recipe.name, ANY_OF_THEM) for recipe in RECIPES.values() if recipe.takes is None]
    configs = [*taken_by_ours(), *(stock_configs() if all_recipes else ())]
    return [*((each.recipe, each.name) for each in configs), *for_any]


def _no_match(words: Sequence[str], everything: Sequence[tuple[str, str]]) -> str:
    names = {part for line in everything for name in line for part in (name, *name.split("/"))}
    hints = [did_you_mean(word, names, most=4, likeness=0.5) for word in words]
    hint = next(filter(None, hints), "; run without words to list all, with --all to include torchtune's own recipes")
    return f"no recipe or config has {' and '.join(words)} in its name{hint}"
