"""List the recipes and their configs: ours, named adaptive/..., and torchtune's.

Words filter the list: tune-adaptive ls qwen2_5 lora
"""

from __future__ import annotations

import argparse

from torchtune_adaptive.config.registry import RECIPES, stock_configs, taken_by_ours
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import did_you_mean

ANY_OF_THEM = "<any config for finetuning, preference training or PPO, except images and tensor parallelism>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="word", help="show only lines that contain all of these words")
    parser.add_argument("--all", action="store_true", help="also list torchtune's own recipes")


def run(options: argparse.Namespace) -> int:
    configs = [*taken_by_ours(), *(stock_configs() if options.all else ())]
    lines = [(config.recipe, config.name) for config in configs]
    lines += [(recipe.name, ANY_OF_THEM) for recipe in RECIPES.values() if recipe.takes is None]
    chosen = [line for line in lines if all(word in " ".join(line) for word in options.words)]
    if not chosen:
        names = {part for line in lines for name in line for part in (name, *name.split("/"))}
        hints = [did_you_mean(word, names, most=4, likeness=0.5) for word in options.words]
        hint = next(filter(None, hints), "; run without words to list all, with --all to include torchtune's recipes")
        raise ConfigError(f"no recipe or config has {' and '.join(options.words)} in its name{hint}")
    width = max(len(recipe) for recipe, _ in lines)
    print("\n".join(f"{recipe:{width}}  {config}" for recipe, config in [("RECIPE", "CONFIG"), *chosen]))
    return 0
