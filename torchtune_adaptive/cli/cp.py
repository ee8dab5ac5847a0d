"""Copy a config or a recipe to change it: tune-adaptive cp adaptive/llama3_2/1B_full mine.yaml"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path

from torchtune_adaptive.atomic_files import replace_file
from torchtune_adaptive.cli.names import file_of, recipe_for
from torchtune_adaptive.config.registry import flags_of
from torchtune_adaptive.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of a config or a recipe (see `tune-adaptive ls`)")
    parser.add_argument("destination", type=_place, help="a file, or an existing folder")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--make-parents", action="store_true", help="create missing folders")


def run(options: argparse.Namespace) -> int:
    source = file_of(options.name)
    if options.make_parents and options.destination.endswith(os.sep):
        _make_parents(Path(options.destination) / source.name)
    destination = target(options.destination, source)
    if options.make_parents:
        _make_parents(destination)
    _write(source.read_bytes(), destination, replace=options.force)
    print(f"copied to {destination}")
    print(f"run it with: {command(options.name, destination)}")
    return 0


def _place(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the destination is empty; give a file or folder name")
    return text


def target(place: str, source: Path) -> Path:
    """The file to write: in a folder, under the name of the source; its ending is always that of the source."""
    destination = Path(place)
    if destination.is_dir():
        return destination / source.name
    if place.endswith(os.sep):
        raise ConfigError(f"folder {destination} does not exist: create it, or pass --make-parents")
    return destination if destination.suffix == source.suffix else Path(f"{destination}{source.suffix}")


def command(name: str, destination: Path) -> str:
    if destination.suffix == ".py":
        return f"tune run {destination} --config ..."
    words = [*flags_of(destination).split(), recipe_for(name) or "RECIPE"]
    return f"tune run {' '.join(words)} --config {destination}"


def _make_parents(destination: Path) -> None:
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {destination.parent}: {error.strerror}; choose another folder") from error


def _write(content: bytes, destination: Path, *, replace: bool) -> None:
    try:
        if replace and destination.exists():
            replace_file(destination.resolve(), content)  # where it is a link, to the file itself
        else:
            _make(destination, content)
    except FileExistsError as error:
        raise ConfigError(f"{destination} already exists: choose another name, or pass --force") from error
    except OSError as error:
        if not destination.parent.exists():
            raise ConfigError(
                f"folder {destination.parent} does not exist: create it, or pass --make-parents"
            ) from error
        raise ConfigError(f"cannot write {destination}: {error.strerror}; choose another place") from error


def _make(destination: Path, content: bytes) -> None:
    """A file that was not there; if it cannot be written whole, it is not there afterwards."""
    with destination.open("xb") as file:
        try:
            file.write(content)
            file.flush()
        except OSError:
            with suppress(OSError):
                destination.unlink()
            raise
