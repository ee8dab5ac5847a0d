"""Log lines and progress bars on stderr, and the exit status of commands that print to stdout."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

PACKAGE_LOGGER = "torchtune_adaptive"
BETWEEN_LINES_S = 30.0
"""Seconds between progress lines if stderr is not a terminal."""
CLOSED_PIPE, INTERRUPTED = 141, 130
"""Exit statuses after the output pipe was closed, and after Ctrl-C, as shells report them."""


def log_to_stderr() -> None:
    """Print the package's log lines to stderr."""
    package_logger = logging.getLogger(PACKAGE_LOGGER)
    if not package_logger.handlers:
        package_logger.addHandler(logging.StreamHandler())
    package_logger.setLevel(logging.INFO)
    package_logger.propagate = False


def log_rank_0(line: str) -> None:
    """Log a line if this is rank 0."""
    import torch.distributed as dist  # here, because commands that only print do not need torch

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
    from tqdm import tqdm  # here, because some commands of `tune-adaptive` work without the extras
    from tqdm.contrib.logging import logging_redirect_tqdm

    in_a_terminal = sys.stderr.isatty()
    options: dict[str, Any] = {"desc": what, "total": total, "initial": done, "unit": f" {unit}", "leave": at_once}
    if not in_a_terminal:
        shape = "{desc} · {n_fmt} of {total_fmt}{unit}, {remaining} left{postfix}"
        options |= {"file": _LogLines(), "position": 0, "bar_format": shape}
        options |= {"mininterval": BETWEEN_LINES_S, "delay": 0 if at_once else BETWEEN_LINES_S}
    above_bar = logging_redirect_tqdm([logging.getLogger(PACKAGE_LOGGER)]) if in_a_terminal and shown else nullcontext()
    with above_bar, tqdm(miniters=1, disable=not shown, **options) as bar:
        yield bar


@contextmanager
def printing() -> Iterator[None]:
    """Exit without a traceback after Ctrl-C, or if the output pipe was closed, for example by `| head`. Print "?" for a
    character that the terminal's encoding does not have."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a forked process may have replaced a file by a pipe, which cannot seek
            sys.stdout.reconfigure(errors="replace")
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit would fail again
        sys.exit(CLOSED_PIPE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
