"""Check a config and overrides as a run would: exit status 0 if the run would start, 1 if not.

tune-adaptive validate llama3_2/1B_full use_maximum_batch_size=True
tune-adaptive validate mine.yaml --ranks 8
tune-adaptive validate mine.yaml --recipe my_recipe.py
tune-adaptive validate mine.yaml --here           # on the machine that it will run on

Checks keys, values and their combinations, and builds every component or checks its arguments. The model is built on
the meta device. Missing devices and files (weights, tokenizer, data) are notes, or errors with --here. The output
folder is always checked. The samples of the dataset are not read.

Components are imported and called as in a run, so a config can execute code (`_component_: os.system`): validate only
configs that you would also run.
"""

from __future__ import annotations

import argparse
import ast
import logging
import os
import re
import sys
from pathlib import Path

from torchtune_adaptive.config.registry import (
    FULL,
    LORA,
    RECIPES,
    TYPICAL_KEYS,
    Recipe,
    config_of,
    recipe_for,
    started_with,
)
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import did_you_mean

FITS, REFUSED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `validate`."""
    parser.add_argument("config", help="name (see `tune-adaptive ls`) or path of a config")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides, as for `tune run`")
    parser.add_argument("--recipe", help="recipe to check against: a name, or the path of a changed copy")
    parser.add_argument("--ranks", type=ranks, metavar="N", help="number of processes on all nodes")
    parser.add_argument("--here", action="store_true", help="also check the devices and files of this machine")


def ranks(text: str) -> int:
    """Parse a number of processes."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of processes; pass a whole number, at least 1")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Print notes and errors; return the exit status."""
    from torchtune_adaptive.cli.check_config import check_config
    from torchtune_adaptive.config.command_line import read_config
    from torchtune_adaptive.lifecycle.console import log_to_stderr

    path = config_of(options.config)
    recipe = recipe_named(options.recipe) if options.recipe else recipe_of_config(options.config, path)
    log_to_stderr()
    # torchtune resets the level whenever it logs
    logging.getLogger("torchtune.utils._logging").addFilter(lambda record: record.levelno >= logging.WARNING)
    if os.getcwd() not in sys.path:  # as in a run, for components in the current folder
        sys.path.insert(0, os.getcwd())
    findings = check_config(read_config(path, options.words), recipe, options.ranks, here=options.here)
    for note in findings.notes:
        print(f"note: {note}")
    for wrong in findings.errors:
        print(f"error: {wrong}", file=sys.stderr)
    if findings.errors:
        return REFUSED
    words = " ".join([options.config, *options.words])
    print(f"ok: {options.recipe or recipe.name} would start with {words} (its samples were not read)")
    return FITS


def recipe_of_config(name: str, path: Path) -> Recipe:
    """Return the recipe of a config: from the registry, the comments of the file, or its keys."""
    recipe = recipe_for(name) or started_with(path)[1]
    if recipe is not None and recipe in RECIPES:
        return RECIPES[recipe]
    if name != str(path):
        raise ConfigError(
            f"{name} is a config of {recipe}, which has no adaptive version: pass --recipe to check it for another"
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    full, adapters = next((kinds for word, kinds in TYPICAL_KEYS.items() if word in text), (FULL, LORA))
    guess = adapters if "lora_attn_modules" in text else full
    print(f"note: {name} does not name its recipe; assuming {guess.name} from its keys (change it with --recipe)")
    return guess


def recipe_named(name: str) -> Recipe:
    """Return a recipe by name; for a modified copy, the recipe that reads its settings with the same function."""
    if name in RECIPES:
        return RECIPES[name]
    if not Path(name).is_file():
        raise ConfigError(f"--recipe {name} is neither an adaptive recipe nor a file{did_you_mean(name, RECIPES)}")
    text = Path(name).read_text(encoding="utf-8", errors="replace")
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"--recipe {name}, line {error.lineno}: {error.msg}") from error
    for recipe in RECIPES.values():
        if recipe.reader and re.search(rf"\b{recipe.reader.partition(':')[2]}\b", text):
            return recipe
    raise ConfigError(
        f"--recipe {name} does not call a function that reads settings, such as read_full_settings: start with a copy "
        "of an adaptive recipe (tune-adaptive cp)"
    )
