"""Run a command on null devices: python -m torchtune_adaptive.null_cuda --memory 80GB -- python train.py"""

from __future__ import annotations

import argparse
import os
import re
import sys

from torchtune_adaptive.null_cuda import NullCudaError, bytes_of, environment


def _memory(text: str) -> int:
    try:
        size = bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 < size < 2**47:
        raise argparse.ArgumentTypeError(f"{text} is out of range: above 0 and below 128TiB")
    return size


def _capability(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError(f"{text} is not a compute capability; for example 9.0")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torchtune_adaptive.null_cuda", description=__doc__)
    parser.add_argument(
        "--memory", type=_memory, help="memory of each card, for example 80GB or 24GiB (default: 80GiB)"
    )
    parser.add_argument(
        "--devices", type=int, choices=range(1, 17), metavar="1..16", help="number of cards (default: 1)"
    )
    parser.add_argument("--capability", type=_capability, help="compute capability (default: 9.0)")
    parser.add_argument("--name", help="name of the card")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    asked = parser.parse_args()
    try:
        variables = environment(
            memory=asked.memory, devices=asked.devices, capability=asked.capability, name=asked.name
        )
    except NullCudaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    os.environ.update(variables)
    try:
        os.execvp(asked.command[0], asked.command)
    except OSError as error:
        print(f"error: cannot run {asked.command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
