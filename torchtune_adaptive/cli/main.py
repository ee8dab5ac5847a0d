"""The command line `tune-adaptive` and its commands `ls`, `cp` and `status`. Works without torch."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from importlib.metadata import version
from pathlib import Path

from torchtune_adaptive.atomic_files import reason, replace_file
from torchtune_adaptive.checkpoints.store import FoundCheckpoint, find_checkpoints
from torchtune_adaptive.config.registry import (
    RECIPES,
    RUN,
    config_files,
    file_named,
    our_configs,
    recipe_files,
    supported_configs,
)
from torchtune_adaptive.dependencies import RECIPES_EXTRA
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.formatting import printable
from torchtune_adaptive.lifecycle import run_state
from torchtune_adaptive.lifecycle.run_state import RunRecord, lock_holder

CLOSED_PIPE, INTERRUPTED = 141, 130
"""Exit statuses after the output pipe was closed, and after Ctrl-C, as shells report them."""


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


def independent_copy(text: str, destination: Path) -> str:
    """Return the text of a config with its own output_dir and command, without demo settings."""
    recipe_for = {stock: name for name, stock in RECIPES.items()}
    text = RUN.sub(lambda found: f"{found[1]}{recipe_for.get(found[2], found[2])} --config {destination}", text)
    text = re.sub(r"^.*# only in the demo\b.*\n", "", text, flags=re.MULTILINE)
    folder = re.compile(r"^(output_dir: \S*/)[^\s/]+", re.MULTILINE)
    return folder.sub(lambda found: f"{found[1]}{destination.stem}", text)


class Condition(IntEnum):
    """The condition of a run. Its value is the exit status."""

    FINISHED = 0
    BROKEN = 1
    CAN_CONTINUE = 75
    """EX_TEMPFAIL of sysexits.h: start the command again later. This is also the status of an active run."""


def status(options: argparse.Namespace) -> int:
    """Report whether a run is finished (exit status 0), can continue (75), or is broken and needs a fix (1).

    Checks only the sizes of a checkpoint's files. A run also verifies their checksums before it resumes.
    """
    condition, lines = condition_of(options.output_dir)
    print("\n".join(map(printable, lines)))  # escaped, because another user may have written the folder
    return condition


def condition_of(directory: Path) -> tuple[Condition, list[str]]:
    """Return the condition of a run and the lines to print."""
    run, active = run_state.read_record(directory), lock_holder(directory)
    try:
        found = find_checkpoints(directory)
    except OSError as error:
        return Condition.BROKEN, [f"{directory} cannot be read: {error.strerror or error}"]
    if run is None and not found:
        return Condition.BROKEN, [f"{directory} {'contains no run' if os.path.isdir(directory) else 'is not a folder'}"]
    condition, reason = _decide(run, active, found)
    lines = [f"running: {active}" if active else f"{condition.name.lower().replace('_', ' ')}: {reason}"]
    if found and (newest := found[0].manifest):
        lines.append(f"newest complete checkpoint: {found[0].path} ({newest.position}, {newest.saved_at})")
    lines += [f"skipped: {each.path} {each.fault}" for each in found if each.manifest is None]
    if not active:
        lines += _last_end(run, condition)
    if not active and condition is not Condition.FINISHED:
        lines.append(_remedy(found, condition))
    return condition, lines


def _decide(run: RunRecord | None, active: str | None, found: Sequence[FoundCheckpoint]) -> tuple[Condition, str]:
    """Return the condition and its reason: the first that applies."""
    newest = found[0].manifest if found else None
    position = str(newest.position) if newest else "from the beginning, no checkpoint is saved yet"
    # a run that was restarted later with more epochs begins with a higher serial
    is_last = newest is not None and newest.finished and (run is None or run.serial <= newest.serial)
    error = run.message if run and run.ended == run_state.ERROR else None
    conditions = (
        (active is not None, Condition.CAN_CONTINUE, position),
        (is_last, Condition.FINISHED, position),
        (error is not None, Condition.BROKEN, error or ""),
        (bool(found) and newest is None, Condition.BROKEN, "the run has no intact checkpoint"),
        (True, Condition.CAN_CONTINUE, position),
    )
    return next((condition, reason) for applies, condition, reason in conditions if applies)


def _last_end(run: RunRecord | None, condition: Condition) -> list[str]:
    """Return a line about how the run has ended last time, unless that is the reason for its condition."""
    if run and run.ended in (run_state.SIGNALLED, run_state.STOPPED):
        return [f"last time: {run.message}"]
    killed = run is not None and run.ended is None and condition is Condition.CAN_CONTINUE
    return ["last time: killed or crashed; later steps are not saved"] * killed


def _remedy(found: Sequence[FoundCheckpoint], condition: Condition) -> str:
    if found and found[0].manifest is None:
        return "start over with another output_dir, or remove this one"
    once_fixed = "once that is fixed, " * (condition is Condition.BROKEN)
    return f"{once_fixed}{'resume' if found else 'start over'} with: {run_state.SAME_COMMAND}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status. Print an error as one line, and "?" for a character that the terminal's
    encoding does not have."""
    options = parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a forked process may have replaced a file by a pipe, which cannot seek
            sys.stdout.reconfigure(errors="replace")
    try:
        exit_status = options.run(options)
        print(end="", flush=True)
        sys.exit(exit_status)
    except BrokenPipeError:  # for example by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit would fail again
        sys.exit(CLOSED_PIPE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except AdaptiveError as error:
        problem = str(error)
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
        prog="tune-adaptive", description="Recipes, configs and runs of torchtune-adaptive.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"torchtune-adaptive {version('torchtune-adaptive')}")
    words = "ls", "cp", "status", "--force", "--help", "--version", *(config.name for config in our_configs())
    parser.add_argument(
        "--completion", action="version", version=f"complete -o default -W '{' '.join(words)}' tune-adaptive",
        help='complete names in bash and zsh: add eval "$(tune-adaptive --completion)" to ~/.bashrc',
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers = {}
    for command in (ls, cp, status):
        text = inspect.cleandoc(command.__doc__ or "")
        parsers[command] = commands.add_parser(
            command.__name__,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parsers[command].set_defaults(command=command.__name__, run=command)
    add = parsers[ls].add_argument
    add("words", nargs="*", metavar="word", help="show only lines that contain all of these words")
    add = parsers[cp].add_argument
    add("name", help="name of a config or a recipe (see `tune-adaptive ls`)")
    add("destination", help="a file, or a folder if it exists or ends with /; missing folders are made")
    add("--force", action="store_true", help="replace an existing file")
    parsers[status].add_argument("output_dir", type=Path, help="the output_dir of the run")
    return parser.parse_args(arguments)
