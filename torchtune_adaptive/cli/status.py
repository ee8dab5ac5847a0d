"""Report whether a run is finished (exit status 0), can go on (75), or is broken and needs a fix (1).

Checks the sizes of a checkpoint's files and, if it is small, their checksums.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from torchtune_adaptive.checkpoints.store import FoundCheckpoint, find_checkpoints, newest_intact
from torchtune_adaptive.life import this_run
from torchtune_adaptive.life.output_lock import holder
from torchtune_adaptive.life.this_run import RunFile
from torchtune_adaptive.text import format_bytes

COMPARED_BYTES = 2**28
"""Bytes of a checkpoint that is read: a second or two, from most disks."""


class Condition(IntEnum):
    """The value is the exit status."""

    FINISHED = 0
    BROKEN = 1
    CAN_GO_ON = 75
    """EX_TEMPFAIL of sysexits.h: start it again, later. Also for a run that is running."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """Everything found of a run."""

    directory: Path
    run: RunFile | None
    found: Sequence[FoundCheckpoint]
    """Checkpoints, newest first; incomplete and damaged ones come last."""
    held_by: str | None
    was_compared: bool
    """Whether the contents of the newest complete one are known to be what was saved."""

    @property
    def newest(self) -> FoundCheckpoint | None:
        return next((each for each in self.found if each.manifest), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", type=Path, help="the output_dir of the run")


def run(options: argparse.Namespace) -> int:
    left = look(options.output_dir)
    condition, reason = judge(left)
    print("\n".join(lines(left, condition, reason)))
    return condition


def look(directory: Path) -> Left:
    run = this_run.read(directory)
    named = directory / run.checkpoints if run else directory
    place = named if named.is_dir() else directory  # it may have been moved as a whole
    held_by, found = holder(place), find_checkpoints(place)
    # what a run writes and removes at this moment is its own affair
    is_small = bool(found) and found[0].manifest is not None and found[0].manifest.bytes <= COMPARED_BYTES
    if held_by or not is_small:
        return Left(directory=directory, run=run, found=found, held_by=held_by, was_compared=False)
    intact, skipped = newest_intact(found)
    found = [*([intact] if intact else []), *skipped]
    return Left(directory=directory, run=run, found=found, held_by=held_by, was_compared=True)


def judge(left: Left) -> tuple[Condition, str]:
    """The condition, and why."""
    run, newest = left.run, left.newest
    if not left.directory.is_dir():
        is_file = left.directory.exists()
        return Condition.BROKEN, f"{left.directory} is not a folder" if is_file else f"{left.directory} does not exist"
    if run is None and not left.found:
        return Condition.BROKEN, f"{left.directory} contains no run"
    if left.held_by is not None:
        return Condition.CAN_GO_ON, "it runs"
    if newest and newest.manifest and newest.manifest.finished and not _started_after(run, newest.manifest.serial):
        return Condition.FINISHED, _where(newest)
    if run is not None and run.ended == this_run.ERROR:
        return Condition.BROKEN, run.message
    if newest is None and left.found:
        return Condition.BROKEN, "it has no intact checkpoint"
    return Condition.CAN_GO_ON, _where(newest) if newest else "from the beginning, nothing is saved yet"


def lines(left: Left, condition: Condition, reason: str) -> Iterator[str]:
    running = left.held_by is not None
    if left.run is None and not left.found:
        yield reason
        return
    yield f"running: {left.held_by}" if running else f"{condition.name.lower().replace('_', ' ')}: {reason}"
    if (newest := left.newest) and newest.manifest:
        yield f"newest complete checkpoint: {newest.path} ({newest.manifest.position}, {newest.manifest.saved_at})"
        if not left.was_compared and not running:
            size = format_bytes(newest.manifest.bytes)
            yield f"  the checksums of its {size} were not verified; a run verifies them before it resumes"
    for each in left.found:
        if each.manifest is None:
            yield f"skipped: {each.path} {each.fault}"
    if running:
        return
    if left.run is not None and left.run.ended in (this_run.ASKED, this_run.STOPPED):
        yield f"last time: {left.run.message}"
    if left.newest is None and left.found:
        yield "start over with: overwrite_output_dir=True resume_from_checkpoint=False, or another output_dir"
    elif condition is not Condition.FINISHED:
        first = "once that is fixed, " * (condition is Condition.BROKEN)
        yield f"{first}{'resume' if left.newest else 'start over'} with: {_command(left)}"


def _started_after(run: RunFile | None, serial: int) -> bool:
    """Whether a run began after that checkpoint was there, with more epochs say."""
    return run is not None and run.serial > serial


def _where(found: FoundCheckpoint) -> str:
    return str(found.manifest.position) if found.manifest else ""


def _command(left: Left) -> str:
    run, here = left.run, left.directory.resolve()
    if run is None:
        return "the command that started it, with resume_from_checkpoint=auto"
    has_moved = run.output_dir and Path(run.folder, run.output_dir).resolve() != here
    elsewhere = f" {shlex.quote(f'output_dir={here}')}" if has_moved else ""
    return f"cd {shlex.quote(run.folder)} && {run.command}{elsewhere}"
