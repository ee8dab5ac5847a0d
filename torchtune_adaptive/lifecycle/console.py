"""Log lines and progress bars on stderr."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)

PACKAGE_LOGGER = "torchtune_adaptive"
BETWEEN_LINES_S = 10.0
"""Seconds between progress lines if stderr is not a terminal."""
SILENT_S = 15.0
"""Seconds without a line after which a line shows that the run is alive."""


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


@contextmanager
def never_silent(phase: Callable[[], str]) -> Iterator[None]:
    """Within the context, log the phase, unless it is "", if nothing has been logged for 15 seconds, for example while
    weights are loaded."""
    start_s = last_s = time.monotonic()
    ended, handlers = threading.Event(), logging.getLogger(PACKAGE_LOGGER).handlers

    def note(_: logging.LogRecord) -> bool:
        nonlocal last_s
        last_s = time.monotonic()
        return True

    def watch() -> None:
        nonlocal last_s
        while not ended.wait(max(0, last_s + SILENT_S - time.monotonic())):
            if (now := time.monotonic()) >= last_s + SILENT_S:
                last_s = now
                if text := phase():
                    logger.info("%s, %.0f s since the start", text, now - start_s)

    for handler in handlers:
        handler.addFilter(note)
    clock = threading.Thread(target=watch, daemon=True)
    clock.start()
    try:
        yield
    finally:
        ended.set()
        clock.join()
        for handler in handlers:
            handler.removeFilter(note)


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
