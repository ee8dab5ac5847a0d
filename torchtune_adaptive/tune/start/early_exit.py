"""Refuses exits from inside a run that would look like its proper end."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torchtune_adaptive.errors import EarlyExitError


@contextmanager
def refusing_early_exits() -> Iterator[None]:
    """Makes `sys.exit(0)` an error: called in a dataset, say, it would report success for no training."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        called = traceback.extract_tb(error.__traceback__)[-1]
        raise EarlyExitError(
            f"sys.exit({error.code!r}) ended the run before it was done, called in {called.name} ({called.filename}, "
            f"line {called.lineno}); raise an error there, or return"
        ) from error
