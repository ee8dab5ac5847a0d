"""Print the file of a config or a recipe; with overrides, the values that a run would use.

tune-adaptive print adaptive/demo/full
tune-adaptive print llama3_2/1B_full batch_size=4 optimizer.lr=1e-5
"""

from __future__ import annotations

import argparse

from torchtune_adaptive.config.registry import config_of, file_of
from torchtune_adaptive.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of a config or a recipe (see `tune-adaptive ls`), or a path")
    parser.add_argument("words", nargs="*", metavar="key=value", help="values that override the config's")


def run(options: argparse.Namespace) -> int:
    if options.words:
        from omegaconf import OmegaConf

        from torchtune_adaptive.config.command_line import read_config

        print(OmegaConf.to_yaml(read_config(config_of(options.name), options.words), resolve=True), end="")
        return 0
    path = file_of(options.name)
    try:
        print(path.read_text(encoding="utf-8"), end="")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    return 0
