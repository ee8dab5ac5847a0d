"""Copy a config or a recipe to change it: tune-adaptive cp adaptive/llama3_2/1B_full mine.yaml

A copy of a config has an output_dir of its own, and nothing that only a demo wants.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from torchtune_adaptive.atomic_files import reason, replace_file
from torchtune_adaptive.config.registry import file_of, recipe_for, started_with
from torchtune_adaptive.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of a config or a recipe (see `tune-adaptive ls`)")
    parser.add_argument("destination", help="a file, or a folder if it exists or ends with /; missing folders are made")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(options: argparse.Namespace) -> int:
    source = file_of(options.name)
    destination = Path(options.destination)
    if destination.is_dir() or options.destination.endswith(os.sep):
        destination /= source.name
    elif destination.suffix != source.suffix:
        destination = Path(f"{destination}{source.suffix}")
    if destination.exists() and not options.force:
        raise ConfigError(f"{destination} already exists: choose another name, or pass --force")
    text = source.read_text(encoding="utf-8")
    is_config = source.suffix != ".py"
    try:
        content = (of_its_own(text, destination) if is_config else text).encode()
        replace_file(destination.resolve(), content)  # where it is a link, the file itself
    except OSError as error:
        raise ConfigError(f"cannot write {destination}: {reason(error)}; choose another place") from error
    print(f"copied to {destination}")
    if is_config:
        flags, recipe = started_with(source)
        words = [*flags.split(), recipe_for(options.name) or recipe or "RECIPE"]
        print(f"run it with: tune run {' '.join(words)} --config {destination}")
    else:
        print(f"run it with: tune run {destination} --config ...")
    return 0


def of_its_own(text: str, destination: Path) -> str:
    """A config in which nothing refers to the one that it was copied from."""
    text = re.sub(r"^(#.*\btune run\b.* --config )\S+", rf"\g<1>{destination}", text, flags=re.MULTILINE)
    text = re.sub(r"^.*# only in the demo\b.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^overwrite_output_dir: True", "overwrite_output_dir: False", text, flags=re.MULTILINE)
    return re.sub(r"^(output_dir: \S*/)[^\s/]+", rf"\g<1>{destination.stem}", text, flags=re.MULTILINE)
