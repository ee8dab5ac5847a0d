"""Run a command on null devices, as in `python -m torchtune_adaptive.null_cuda --memory 80GB -- python train.py`."""

from __future__ import annotations

import argparse
import os
import sys

from torchtune_adaptive.null_cuda import NullCudaError, environment


def main() -> int:
    """Replace this process by the command; return an exit status if that fails."""
    parser = argparse.ArgumentParser(prog="python -m torchtune_adaptive.null_cuda", description=__doc__)
    parser.add_argument("--memory", help="memory of each device, for example 80GB or 24GiB (default: 80GiB)")
    parser.add_argument("--devices", type=int, metavar="1..16", help="number of devices (default: 1)")
    parser.add_argument("--capability", help="compute capability (default: 9.0)")
    parser.add_argument("--name", help="name of the devices")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    card = vars(parser.parse_args())
    command = card.pop("command")
    try:
        variables = environment(**card)
    except ValueError as error:
        parser.error(str(error))
    except NullCudaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    os.environ.update(variables)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
