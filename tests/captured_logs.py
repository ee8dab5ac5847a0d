"""Capture log lines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Lines(logging.Handler):
    """Collects log records, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


@contextmanager
def captured_log(name: str = "torchtune_adaptive") -> Iterator[list[str]]:
    """Collect the lines of this logger and its children."""
    logger, captured = logging.getLogger(name), Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(captured)
    try:
        yield captured.lines
    finally:
        logger.removeHandler(captured)
