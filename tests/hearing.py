"""What a logger says while something runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Lines(logging.Handler):
    """Keeps what is logged, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


@contextmanager
def listening(name: str = "torchtune_adaptive") -> Iterator[list[str]]:
    """The lines that this logger and those below it log while this is open."""
    logger, heard = logging.getLogger(name), Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)
    try:
        yield heard.lines
    finally:
        logger.removeHandler(heard)
