"""What prints a result and ends: exit statuses, and readers that have gone."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torchtune_adaptive.errors import AdaptiveError

NOBODY_READS = 141
"""The exit status that shells give to a command whose pipe was closed."""
INTERRUPTED = 130
"""The exit status that shells give to a command ended by Ctrl-C."""


@contextmanager
def printing() -> Iterator[None]:
    """Around what prints a result: a closed pipe (`| head`) or a full disk is no traceback."""
    if sys.stdout is None:  # closed before the start, as by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end of the process
    with suppress(OSError):  # what was a file at the start, and is a pipe now, cannot be asked where it is
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _print_nowhere()
        sys.exit(NOBODY_READS)
    except OSError as error:
        if error.filename is not None:  # a file, and not what is printed
            raise
        _print_nowhere()
        raise AdaptiveError(f"cannot write the output: {error.strerror}; redirect it elsewhere") from error


def _print_nowhere() -> None:
    """What is still to be flushed would fail once more when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
