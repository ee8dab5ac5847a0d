"""Log lines and progress bars of a run on stderr, and commands that print a result to stdout."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.atomic_files import reason
from torchtune_adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

OURS = "torchtune_adaptive"
BETWEEN_LINES_S = 30.0
"""Seconds between progress lines without a terminal."""
CLOSED_PIPE, INTERRUPTED = 141, 130
"""Exit statuses of a command whose output pipe was closed, or that Ctrl-C ended, as in shells."""


def log_to_stderr() -> None:
    """Print the package's log lines to stderr. The library logs on rank 0 only."""
    ours = logging.getLogger(OURS)
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
    ours.setLevel(logging.INFO)
    ours.propagate = False


def say(line: str) -> None:
    """Log a line on rank 0 only."""
    import torch.distributed as dist  # here, because commands that only print run without torch

    if dist.get_rank() == 0:
        logger.info("%s", line)


class LossyStream(io.FileIO):
    """A stream that never raises: failed writes are dropped, with one warning."""

    _failed = False

    def write(self, data: Any, /) -> Any:
        """Write, or drop the data if that fails."""
        try:
            return super().write(data)
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning("cannot write to stdout (%s): its output is lost", reason(error))
            return len(data)


def tolerate_closed_stdout() -> None:
    """Keep a run alive if stdout is a closed pipe (`| head`) or a file on a full disk; components may print to it."""
    before = sys.stdout
    if before is not sys.__stdout__ or not isinstance(before, io.TextIOWrapper):  # replaced or closed by the user
        return
    before.flush()
    # Wrap below the buffers: they would keep failed output and fail again at exit.
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(LossyStream(before.fileno(), "w", closefd=False)),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=before.line_buffering or before.write_through,
    )


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
    """Handle a closed pipe (`| head`) or a full disk without a traceback while a result is printed."""
    if sys.stdout is None:  # closed by the caller, for example with `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end of the process
    with suppress(OSError):  # tell() fails if the file was replaced by a pipe
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        closed_pipe = isinstance(error, BrokenPipeError)
        if error.filename is not None and not closed_pipe:  # concerns a file, not stdout
            raise
        # flushing the rest at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if closed_pipe:
            sys.exit(CLOSED_PIPE)
        raise AdaptiveError(f"cannot write the output: {error.strerror}; redirect it elsewhere") from error
