"""Capture log lines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def captured_log(name: str = "torchtune_adaptive") -> Iterator[list[str]]:
    """Collect the lines of this logger and its children."""
    logger, handler, lines = logging.getLogger(name), logging.Handler(), list[str]()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
