"""Exit codes and closed pipes for commands that print a result."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torchtune_adaptive.errors import AdaptiveError

CLOSED_PIPE = 141
"""Exit status of a command whose output pipe was closed, as in shells."""
INTERRUPTED = 130
"""Exit status of a command ended by Ctrl-C, as in shells."""


@contextmanager
def printing() -> Iterator[None]:
    """Handle a closed pipe (`| head`) or a full disk without a traceback while a result is printed."""
    if sys.stdout is None:  # closed by the caller, for example with `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end of the process
    with suppress(OSError):  # tell() fails if the file was replaced by a pipe
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _print_nowhere()
        sys.exit(CLOSED_PIPE)
    except OSError as error:
        if error.filename is not None:  # concerns a file, not stdout
            raise
        _print_nowhere()
        raise AdaptiveError(f"cannot write the output: {error.strerror}; redirect it elsewhere") from error


def _print_nowhere() -> None:
    """Redirect stdout to /dev/null: flushing the rest at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
