"""What a run leaves for whoever starts it again: the command, its launchers, and how it ended."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from torchtune_adaptive.atomic_files import read_json, reason, replace_file

logger = logging.getLogger(__name__)

RUN_FILE = "adaptive_run.json"

ASKED, STOPPED, FINISHED, ERROR = "asked", "stopped", "finished", "error"
"""The first is what is known until the run says more: it was asked to end."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    command: str
    """The command that goes on with this run."""
    folder: str
    """The folder in which to type it."""
    checkpoints: str
    """The folder that they are in; from that of the run, where it is inside of it."""
    serial: int
    """Serial of the next checkpoint when the run was started: a finished one before that is not the end of this run."""
    started_at: str
    ended: str | None = None
    """One of the above; None: it runs, or something has ended it that left it no time to say so."""
    message: str = ""
    output_dir: str = ""
    """Where the run was: a copy lies elsewhere."""
    launchers: list[str] = field(default_factory=list)
    """The launchers of its ranks."""


def now() -> str:
    """The time, to the second, as files tell it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def begin(directory: Path, command: str, checkpoints: Path, serial: int, launchers: Iterable[str] = ()) -> None:
    here, place = directory.absolute(), checkpoints.absolute()
    run = RunFile(
        command=command,
        folder=os.getcwd(),
        checkpoints=str(place.relative_to(here) if place.is_relative_to(here) else place),
        serial=serial,
        started_at=now(),
        output_dir=str(here),
        launchers=list(launchers),
    )
    write(directory, run)


def end(directory: Path, how: str, message: str = "") -> None:
    run = read(directory)
    if run is not None and (how != ASKED or run.ended in (None, ASKED)):
        write(directory, replace(run, ended=how, message=message))


def read(directory: Path) -> RunFile | None:
    """None where there is no file, or one that somebody has edited so that a value has not its type."""
    try:
        run = RunFile(**(read_json(directory / RUN_FILE) or {}))
        texts = (run.command, run.folder, run.checkpoints, run.started_at, run.ended or "", run.message, run.output_dir)
        sound = type(run.serial) is int and isinstance(run.launchers, list)
        return run if sound and all(isinstance(text, str) for text in (*texts, *run.launchers)) else None
    except (OSError, ValueError, TypeError):
        return None


def write(directory: Path, run: RunFile) -> None:
    """A run is worth more than a file about it, so a full disk ends none. But what the run before it has left there
    would be taken for its own."""
    path, content = directory / RUN_FILE, json.dumps(asdict(run), indent=1).encode()
    try:
        replace_file(path, content)
    except OSError as error:
        with suppress(OSError), path.open("r+b", buffering=0) as file:  # into the room that it has: the disk is full
            file.truncate(file.write(content))
            if path.stat().st_size == len(content):
                return
        logger.warning(
            "cannot write %s (%s): `tune-adaptive status` cannot report how this run ended", path, reason(error)
        )
