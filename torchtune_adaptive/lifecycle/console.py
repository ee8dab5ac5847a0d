"""Log lines and progress bars of a run on stderr, and commands that print a result to stdout."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

OURS = "torchtune_adaptive"
BETWEEN_LINES_S = 30.0
"""Seconds between progress lines without a terminal."""
SLOW_S = 2.0
CLOSED_PIPE, INTERRUPTED = 141, 130
"""Exit statuses of a command whose output pipe was closed, or that Ctrl-C ended, as in shells."""


def log_to_stderr() -> None:
    """Print the package's log lines to stderr. The library logs on rank 0 only."""
    ours = logging.getLogger(OURS)
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
    ours.setLevel(logging.INFO)
    ours.propagate = False


def log_rank_0(line: str) -> None:
    """Log a line on rank 0 only."""
    import torch.distributed as dist  # here, because commands that only print run without torch

    if dist.get_rank() == 0:
        logger.info("%s", line)


@contextmanager
def log_if_slow(what: str) -> Iterator[None]:
    """Log on rank 0 how long a phase of the start took, if that was over two seconds; also works as a decorator."""
    start = time.monotonic()
    yield
    if (seconds := time.monotonic() - start) > SLOW_S:
        log_rank_0(f"{what} · {seconds:.0f} s")


class _LogLines(io.TextIOBase):
    """Write each state of a progress bar as a log line."""

    _last = ""

    def write(self, text: str, /) -> int:
        line = text.strip()
        if line not in ("", self._last):
            logger.info("%s", line)
            self._last = line
        return len(text)


@contextmanager
def progress_bar(
    what: str, total: int | None, unit: str, *, done: int = 0, shown: bool = True, at_once: bool = False
) -> Iterator[tqdm[Any]]:
    """Show a progress bar in a terminal, or a log line every 30 seconds elsewhere.

    With `at_once` the first state is shown immediately and the last one stays.
    """
    from tqdm import tqdm  # `tune-adaptive` prints without the extras
    from tqdm.contrib.logging import logging_redirect_tqdm

    in_a_terminal = sys.stderr.isatty()
    options: dict[str, Any] = {"desc": what, "total": total, "initial": done, "unit": f" {unit}", "leave": at_once}
    if not in_a_terminal:
        counted = "{n_fmt}{unit}" if total is None else "{n_fmt} of {total_fmt}{unit}"
        options |= {"file": _LogLines(), "position": 0, "bar_format": f"{{desc}} · {counted}{{postfix}}"}
        options |= {"mininterval": BETWEEN_LINES_S, "delay": 0 if at_once else BETWEEN_LINES_S}
    around = logging_redirect_tqdm([logging.getLogger(OURS)]) if in_a_terminal and shown else nullcontext()
    with around, tqdm(miniters=1, disable=not shown, **options) as bar:
        yield bar


@contextmanager
def printing() -> Iterator[None]:
    """Exit without a traceback if the output goes to a closed pipe (`| head`)."""
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushing the rest at exit would fail again
        sys.exit(CLOSED_PIPE)
