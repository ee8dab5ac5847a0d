"""Print the file of a config or a recipe; with overrides, the values that a run would use.

tune-adaptive print adaptive/demo/full
tune-adaptive print llama3_2/1B_full batch_size=4 optimizer.lr=1e-5
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtune_adaptive.cli.names import config_of, file_of
from torchtune_adaptive.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of a config or a recipe (see `tune-adaptive ls`), or a path")
    parser.add_argument("words", nargs="*", metavar="key=value", help="values that override the config's")


def run(options: argparse.Namespace) -> int:
    text = values(config_of(options.name), options.words) if options.words else _text(file_of(options.name))
    print(text, end="")
    return 0


def values(config: Path, overrides: list[str]) -> str:
    from omegaconf import OmegaConf

    from torchtune_adaptive.config.command_line import read_config

    cfg = read_config(config, overrides)
    return OmegaConf.to_yaml(cfg, resolve=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
