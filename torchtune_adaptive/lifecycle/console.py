"""Log lines and progress bars on stderr."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)

PACKAGE_LOGGER = "torchtune_adaptive"
BETWEEN_LINES_S = 30.0
"""Seconds between progress lines if stderr is not a terminal."""


def log_to_stderr() -> None:
    """Print the package's log lines to stderr."""
    package_logger = logging.getLogger(PACKAGE_LOGGER)
    if not package_logger.handlers:
        package_logger.addHandler(logging.StreamHandler())
    package_logger.setLevel(logging.INFO)
    package_logger.propagate = False


def log_rank_0(line: str) -> None:
    """Log a line if this is rank 0."""
    if dist.get_rank() == 0:
        logger.info("%s", line)


class _LogLines(io.TextIOBase):
    """A file for tqdm that logs each new state of a progress bar as a line."""

    _last = ""

    def write(self, text: str, /) -> int:
        line = text.strip()
        if line not in ("", self._last):
            logger.info("%s", line)
            self._last = line
        return len(text)


@contextmanager
def progress_bar(
    what: str, total: int, unit: str, *, done: int = 0, shown: bool = True, at_once: bool = False
) -> Iterator[tqdm[Any]]:
    """Show a progress bar in a terminal; elsewhere, log a line every 30 seconds. With `at_once`, the first state is
    shown immediately, and the bar stays in the terminal at the end."""
    in_a_terminal = sys.stderr.isatty()
    options: dict[str, Any] = {"desc": what, "total": total, "initial": done, "unit": f" {unit}", "leave": at_once}
    if not in_a_terminal:
        shape = "{desc} · {n_fmt} of {total_fmt}{unit}, {remaining} left{postfix}"
        options |= {"file": _LogLines(), "position": 0, "bar_format": shape}
        options |= {"mininterval": BETWEEN_LINES_S, "delay": 0 if at_once else BETWEEN_LINES_S}
    above_bar = logging_redirect_tqdm([logging.getLogger(PACKAGE_LOGGER)]) if in_a_terminal and shown else nullcontext()
    with above_bar, tqdm(miniters=1, disable=not shown, **options) as bar:
        yield bar
