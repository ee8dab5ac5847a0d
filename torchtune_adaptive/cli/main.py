"""Parses the command line of `tune-adaptive` and runs a command. The commands `ls` and `cp` are defined here."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from torchtune_adaptive.atomic_files import reason, replace_file
from torchtune_adaptive.cli import status
from torchtune_adaptive.config.registry import RECIPES, RUN, config_files, file_named, recipe_files, supported_configs
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.dependencies import RECIPES_EXTRA
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.formatting import printable
from torchtune_adaptive.lifecycle.console import printing


def ls(options: argparse.Namespace) -> int:
    """List the recipes and their configs: those of this package, named adaptive/..., and torchtune's.

    Words filter the list: tune-adaptive ls qwen2_5 lora
    """
    lines = [(config.recipe, config.name) for config in supported_configs()]
    chosen = [line for line in lines if all(word in " ".join(line) for word in options.words)]
    if not chosen:
        raise ConfigError(f"no recipe or config contains {' and '.join(options.words)}: tune-adaptive ls lists all")
    width = max(len(recipe) for recipe, _ in lines)
    print("\n".join(f"{recipe:{width}}  {config}" for recipe, config in [("RECIPE", "CONFIG"), *chosen]))
    return 0


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ls`."""
    parser.add_argument("words", nargs="*", metavar="word", help="show only lines that contain all of these words")


def cp(options: argparse.Namespace) -> int:
    """Copy a config or a recipe to change it.

    tune-adaptive cp adaptive/llama3_2/1B_full mine.yaml

    A copied config gets a new output_dir and loses settings that only the demo needs.
    """
    source = file_named(options.name, config_files() | recipe_files(), "config or recipe")
    destination = Path(options.destination)
    if destination.is_dir() or options.destination.endswith(os.sep):
        destination /= source.name
    elif destination.suffix != source.suffix:
        destination = Path(f"{destination}{source.suffix}")
    if destination.exists() and not options.force:
        raise ConfigError(f"{destination} already exists: choose another name, or pass --force")
    text, command = source.read_text(encoding="utf-8"), f"tune run {destination} --config ..."
    if source.suffix != ".py":
        text = independent_copy(text, destination)
        command = found[0] if (found := RUN.search(text)) else f"tune run RECIPE --config {destination}"
    try:
        replace_file(destination.resolve(), text.encode())  # follow a symbolic link
    except OSError as error:
        raise ConfigError(f"cannot write {destination}: {reason(error)}; choose another place") from error
    print(f"copied to {destination}\nrun it with: {command.removeprefix('#').strip()}")
    return 0


def add_cp_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cp`."""
    parser.add_argument("name", help="name of a config or a recipe (see `tune-adaptive ls`)")
    parser.add_argument("destination", help="a file, or a folder if it exists or ends with /; missing folders are made")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def independent_copy(text: str, destination: Path) -> str:
    """Return the text of a config with its own output_dir and command, without demo settings."""
    recipe_for = {recipe.stock_name: name for name, recipe in RECIPES.items()}
    text = RUN.sub(lambda found: f"{found[1]}{recipe_for.get(found[2], found[2])} --config {destination}", text)
    text = re.sub(r"^.*# only in the demo\b.*\n", "", text, flags=re.MULTILINE)
    folder = re.compile(r"^(output_dir: \S*/)[^\s/]+", re.MULTILINE)
    return folder.sub(lambda found: f"{found[1]}{destination.stem}", text)


class Command(NamedTuple):
    """A command of `tune-adaptive`."""

    help: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit status."""


COMMANDS = {
    "ls": Command(ls.__doc__, add_ls_arguments, ls),
    "cp": Command(cp.__doc__, add_cp_arguments, cp),
    "status": Command(status.__doc__, status.add_arguments, status.run),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status. Print an error as one line."""
    options = parse(arguments)
    try:
        with printing():
            exit_status = options.run(options)
        sys.exit(exit_status)
    except AdaptiveError as error:
        problem = error.in_words(KEYS)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in RECIPES_EXTRA:
            raise
        problem = (
            f"tune-adaptive {options.command} needs {missing}, which is not installed: install the [recipes] extra, in "
            "a checkout of this project with: pip install '.[recipes]'"
        )
    except OSError as error:
        problem = printable(f"{error.filename or 'stdout'}: {error.strerror}; correct the path")
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. If it is invalid, print the usage and exit."""
    parser = argparse.ArgumentParser(
        prog="tune-adaptive", description="Recipes, configs and runs of torchtune-adaptive."
    )
    parser.add_argument("--version", action="version", version=f"torchtune-adaptive {version('torchtune-adaptive')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = inspect.cleandoc(command.help or "")
        subparser = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=name, run=command.run)
    return parser.parse_args(arguments)
