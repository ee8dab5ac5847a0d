"""The command line of `tune-adaptive`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from torchtune_adaptive.command import status

COMMANDS: dict[str, ModuleType] = {"status": status}
"""Each has a docstring for its help, `add_arguments(parser)`, and `run(options) -> int`, which is the exit status."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tune-adaptive", description="Commands about runs of torchtune-adaptive.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary, _, _ = str(module.__doc__).partition("\n")
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    sys.exit(options.run(options))
