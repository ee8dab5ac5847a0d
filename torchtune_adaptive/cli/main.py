"""The command line of `tune-adaptive`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType

from torchtune_adaptive.cli import cp, ls, status, validate
from torchtune_adaptive.config.remedies import in_keys
from torchtune_adaptive.dependencies import RECIPES_EXTRA, recipes_extra_is_missing
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.formatting import printable
from torchtune_adaptive.lifecycle.console import INTERRUPTED, printing
from torchtune_adaptive.rehearse import command as rehearse

COMMANDS: dict[str, ModuleType] = {"ls": ls, "cp": cp, "validate": validate, "status": status, "rehearse": rehearse}
"""Each has a docstring for its help, `add_arguments(parser)`, and `run(options) -> int`, which is the exit status. An
error's is its `FAILED`, else 1.
One that takes any number of words has them in `options.words`."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        with printing():
            status = options.run(options)
    except AdaptiveError as error:
        print(f"error: {in_keys(error)}", file=sys.stderr)
        status = options.failed
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in RECIPES_EXTRA:
            raise
        print(f"error: {recipes_extra_is_missing(f'tune-adaptive {options.command}', missing)}", file=sys.stderr)
        status = options.failed
    except OSError as error:
        print(f"error: {printable(f'{error.filename}: {error.strerror}')}; correct the path", file=sys.stderr)
        status = options.failed
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tune-adaptive", description="Recipes, configs and runs of torchtune-adaptive."
    )
    parser.add_argument("--version", action="version", version=f"torchtune-adaptive {version('torchtune-adaptive')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=str(module.__doc__).partition("\n")[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(command=name, run=module.run, failed=getattr(module, "FAILED", 1), refuse=command.error)
    options, rest = parser.parse_known_args(arguments)
    # argparse leaves over the words that stand behind an option
    if rest and (not hasattr(options, "words") or any(word.startswith("-") for word in rest)):
        options.refuse(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.words += rest
    return options
