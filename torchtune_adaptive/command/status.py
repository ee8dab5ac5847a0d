"""Whether a run is finished (exit status 0), can go on (75), or is broken and needs somebody (1).

It reads sizes of files, not what is in them.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from torchtune_adaptive.tune.parts.checkpoints.folders import Found, find_checkpoints
from torchtune_adaptive.tune.parts.checkpoints.lock import holder
from torchtune_adaptive.tune.start import run_file
from torchtune_adaptive.tune.start.run_file import RunFile


class Condition(IntEnum):
    """The value is the exit status."""

    FINISHED = 0
    BROKEN = 1
    CAN_GO_ON = 75
    """What sysexits.h calls EX_TEMPFAIL: the same again, later. Also where it runs."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What is found of a run."""

    directory: Path
    run: RunFile | None
    found: Sequence[Found]
    """Checkpoints, newest first; incomplete ones come last."""
    held_by: str | None

    @property
    def newest(self) -> Found | None:
        return next((each for each in self.found if each.manifest), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", type=Path, help="the output_dir of the run")


def run(options: argparse.Namespace) -> int:
    left = look(options.output_dir)
    condition, reason = judge(left)
    print("\n".join(lines(left, condition, reason)))
    return condition


def look(directory: Path) -> Left:
    run = run_file.read(directory)
    named = directory / run.checkpoints if run else directory
    place = named if named.is_dir() else directory  # it may have been moved as a whole
    return Left(directory=directory, run=run, found=find_checkpoints(place), held_by=holder(place))


def judge(left: Left) -> tuple[Condition, str]:
    """The condition, and why."""
    run, newest = left.run, left.newest
    if not left.directory.is_dir():
        return Condition.BROKEN, f"there is no folder {left.directory}"
    if run is None and not left.found:
        return Condition.BROKEN, f"no run has left anything in {left.directory}"
    if newest and newest.manifest and newest.manifest.finished and not _started_after(run, newest.manifest.serial):
        return Condition.FINISHED, _where(newest)
    if left.held_by is not None:
        return Condition.CAN_GO_ON, "it runs"
    if run is not None and run.ended == run_file.ERROR:
        return Condition.BROKEN, run.message
    if newest is None and left.found:
        return Condition.BROKEN, "none of its checkpoints is complete"
    return Condition.CAN_GO_ON, _where(newest) if newest else "from its beginning, nothing is saved yet"


def lines(left: Left, condition: Condition, reason: str) -> Iterator[str]:
    running = left.held_by is not None and condition is Condition.CAN_GO_ON
    if left.run is None and not left.found:
        yield reason
        return
    yield f"running: {left.held_by}" if running else f"{condition.name.lower().replace('_', ' ')}: {reason}"
    if (newest := left.newest) and newest.manifest:
        yield f"newest complete checkpoint: {newest.path} ({newest.manifest.position}, {newest.manifest.saved_at})"
    for each in left.found:
        if each.manifest is None:
            yield f"passed over: {each.path} {each.fault}"
    if running:
        return
    if left.run is not None and left.run.ended in (run_file.ASKED, run_file.STOPPED):
        yield f"last time: {left.run.message}"
    if left.newest is None and left.found:
        yield "begins anew with: overwrite_output_dir=True resume_from_checkpoint=False, or another output_dir"
    elif condition is not Condition.FINISHED:
        yield f"{'goes on' if left.newest else 'starts anew'} with: {_command(left)}"


def _started_after(run: RunFile | None, serial: int) -> bool:
    """Whether a run began after that checkpoint was there, with more epochs say."""
    return run is not None and run.serial > serial


def _where(found: Found) -> str:
    return str(found.manifest.position) if found.manifest else ""


def _command(left: Left) -> str:
    run, here = left.run, str(left.directory.absolute())
    if run is None:
        return "the command that started it, with resume_from_checkpoint=auto"
    elsewhere = f" {shlex.quote(f'output_dir={here}')}" if run.output_dir not in ("", here) else ""
    return f"cd {shlex.quote(run.folder)} && {run.command}{elsewhere}"
