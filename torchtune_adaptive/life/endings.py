"""What prints a result and ends: exit statuses, and readers that have gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY_READS = 141
"""The exit status that shells give to a command whose pipe was closed."""
INTERRUPTED = 130
"""The exit status that shells give to a command ended by Ctrl-C."""


@contextmanager
def printing() -> Iterator[None]:
    """Around what prints a result: a reader who has seen enough, as `| head`, is no traceback."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still to be flushed would fail once more when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(NOBODY_READS)
