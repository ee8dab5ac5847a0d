"""How a run speaks: in lines for people, or, if asked to, in JSON for machines; progress as a bar, or as lines, too."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from typing import Any

import torch.distributed as dist
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchtune_adaptive.atomic_files import reason
from torchtune_adaptive.errors import ConfigError

logger = logging.getLogger(__name__)

FORMAT = "TORCHTUNE_ADAPTIVE_LOG"
"""Environment variable: `json` makes every line an object."""
SHOW_CONFIG = "TORCHTUNE_ADAPTIVE_SHOW_CONFIG"
"""Environment variable: set, the whole config is printed at the start, as torchtune's recipes do."""
OURS, TORCHTUNES = "torchtune_adaptive", "torchtune.utils._logging"
BETWEEN_LINES_S = 30.0
"""Seconds between lines of progress, where there is no terminal that could show a bar."""


def in_json() -> bool:
    given = os.environ.get(FORMAT, "text")
    if given not in ("text", "json"):
        raise ConfigError(f"{FORMAT} is {given!r}: allowed is text or json")
    return given == "json"


def show_decisions() -> None:
    """Our own log lines on stderr: the library logs on rank 0 only. In JSON torchtune's are objects, too."""
    ours = logging.getLogger(OURS)
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
    ours.setLevel(logging.INFO)
    ours.propagate = False
    if in_json():
        for handler in (*ours.handlers, *logging.getLogger(TORCHTUNES).handlers):
            handler.setFormatter(JsonLines())


class JsonLines(logging.Formatter):
    """A line as an object: when, how urgent, from where, on which rank, what."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "rank": int(os.environ.get("RANK", "0")),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class LossyStream(io.FileIO):
    """A stream whose reader may end, or whose disk may fill: what is printed then is lost, and one line says so."""

    _failed = False

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning("stdout cannot be written (%s): what is printed is lost", reason(error))
            return len(data)


def outlive_readers() -> None:
    """Makes a run independent of who reads what components print on stdout, such as torchtune's metric loggers."""
    before = sys.stdout
    if before is not sys.__stdout__ or not isinstance(before, io.TextIOWrapper):  # replaced by somebody, or closed
        return
    before.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(LossyStream(before.fileno(), "w", closefd=False)),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=before.line_buffering or before.write_through,
    )


def say(line: str) -> None:
    """Logs a line, on rank 0 only."""
    if dist.get_rank() == 0:
        logger.info("%s", line)


def tell_error(message: str, where: str = "") -> None:
    """The one message with which a run ends."""
    if in_json():
        logger.error("%s", message)
    else:
        print(f"\nerror{where}: {message}", file=sys.stderr, flush=True)


class ProgressShown:
    """How far something has come: a bar in a terminal; elsewhere a line now and then, and none that others hang on."""

    def __init__(self, what: str, total: int | None, unit: str, *, done: int, shown: bool, at_once: bool) -> None:
        in_a_terminal = sys.stderr.isatty() and not in_json()
        self._what, self._unit, self._total = what, unit, total
        self._tells, self._ends = shown and not in_a_terminal, at_once
        self._next_s = time.monotonic() + (0 if at_once else BETWEEN_LINES_S)
        self.done = done
        self.bar = tqdm(
            desc=what, total=total, initial=done, unit=f" {unit}", leave=at_once, disable=not (shown and in_a_terminal)
        )

    def note(self, note: str) -> None:
        """What is under way."""
        self.bar.set_postfix_str(note)

    def update(self, count: int = 1, note: str = "") -> None:
        self.done += count
        if note:
            self.note(note)
        if self._total is not None and self.done > self._total:  # there is more to do than was thought
            self._total = self.bar.total = self.done
        self.bar.update(count)
        now_s = time.monotonic()
        if self._tells and (now_s >= self._next_s or (self._ends and self.done == self._total)):
            of = "" if self._total is None else f" of {self._total}"
            logger.info("%s · %d%s %s%s", self._what, self.done, of, self._unit, f" · {note}" if note else "")
            self._next_s = now_s + BETWEEN_LINES_S


@contextmanager
def progress_bar(
    what: str, total: int | None, unit: str, *, done: int = 0, shown: bool = True, at_once: bool = False
) -> Iterator[ProgressShown]:
    """`at_once`: also the first and the last are told where there is no bar, and a bar stays when it is full."""
    shows = ProgressShown(what, total, unit, done=done, shown=shown, at_once=at_once)
    with ExitStack() as around:
        if not shows.bar.disable:  # or our lines would be written into the bar's
            around.enter_context(logging_redirect_tqdm([logging.getLogger(OURS)]))
        around.enter_context(shows.bar)
        yield shows
