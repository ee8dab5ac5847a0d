"""Check a config and overrides as a run would: exit status 0 if the run would start, 1 if not.

tune-adaptive validate llama3_2/1B_full use_maximum_batch_size=True
tune-adaptive validate mine.yaml --ranks 8
tune-adaptive validate mine.yaml --here           # on the machine that it will run on

Checks keys, values and their combinations, and builds every component or checks its arguments; the model is built
without weights, on no device. Properties of the machine (devices, files of weights and tokenizer, whether the output
folder is writable) are reported as notes, with --here as errors. The content of the output folder is always checked.
The dataset is not read.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from torchtune_adaptive.cli.names import config_of, recipe_for
from torchtune_adaptive.config.registry import FULL, LORA, RECIPES, recipe_of
from torchtune_adaptive.errors import ConfigError

FITS, REFUSED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="name (see `tune-adaptive ls`) or path of a config")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides, as for `tune run`")
    parser.add_argument(
        "--recipe", choices=RECIPES, metavar="RECIPE", help="recipe to check against, if the config does not name it"
    )
    parser.add_argument("--ranks", type=ranks, metavar="N", help="number of processes on all nodes together")
    parser.add_argument(
        "--here", action="store_true", help="the run will use this machine: check its devices and files, too"
    )


def run(options: argparse.Namespace) -> int:
    from torchtune_adaptive.config.command_line import read_config
    from torchtune_adaptive.life.console import show_decisions
    from torchtune_adaptive.tune.validate.config import check_config

    config = config_of(options.config)
    recipe = options.recipe or chosen_recipe(options.config, config)
    show_decisions()
    # torchtune sets the level anew whenever it logs
    logging.getLogger("torchtune.utils._logging").addFilter(lambda record: record.levelno >= logging.WARNING)
    if os.getcwd() not in sys.path:  # as for a run, whose components may stand beside its config
        sys.path.insert(0, os.getcwd())
    findings = check_config(read_config(config, options.words), recipe, options.ranks, here=options.here)
    for note in findings.notes:
        print(f"note: {note}")
    for wrong in findings.wrong:
        print(f"error: {wrong}", file=sys.stderr)
    if findings.wrong:
        return REFUSED
    print(f"ok: {recipe} would start with {' '.join([options.config, *options.words])}")
    return FITS


def chosen_recipe(name: str, config: Path) -> str:
    """The recipe that a config belongs to: by our list, by what its file says, or by its model."""
    named = recipe_for(name) or recipe_of(config)
    if named is not None and named in RECIPES:
        return named
    if name != str(config):
        raise ConfigError(
            f"{name} is a config of {named}, which is not one of our recipes: pass --recipe to check it for another"
        )
    return LORA.name if "lora_attn_modules" in config.read_text(encoding="utf-8", errors="replace") else FULL.name


def ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of processes; give a whole number, 1 or more")
    return int(text)
