"""Report whether a run is finished (exit status 0), can go on (75), or is broken and needs a fix (1).

Checks the sizes of a checkpoint's files and, if it is small, their checksums.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from torchtune_adaptive.checkpoints.store import FoundCheckpoint, compared, find_checkpoints
from torchtune_adaptive.life import run_file
from torchtune_adaptive.life.output_lock import holder
from torchtune_adaptive.life.run_file import RunFile
from torchtune_adaptive.text import format_bytes

COMPARED_BYTES = 2**28
"""Bytes that are read of checkpoints at most: a second or two, from most disks."""


class Condition(IntEnum):
    """The value is the exit status."""

    FINISHED = 0
    BROKEN = 1
    CAN_GO_ON = 75
    """EX_TEMPFAIL of sysexits.h: start it again, later. Also for a run that is running."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", type=Path, help="the output_dir of the run")


def run(options: argparse.Namespace) -> int:
    directory: Path = options.output_dir
    left = run_file.read(directory)
    named = directory / left.checkpoints if left else directory
    place = named if named.is_dir() else directory  # it may have been moved as a whole
    held_by, found, verified = holder(place), find_checkpoints(place), False
    if left is None and not found:
        exists = "is not a folder" if directory.exists() else "does not exist"
        print(f"{directory} {'contains no run' if directory.is_dir() else exists}")
        return Condition.BROKEN
    if held_by is None:  # what a run writes and removes at this moment is its own affair
        found, verified = _verified(found)
    newest = next((one for one in found if one.manifest), None)
    condition, reason = (Condition.CAN_GO_ON, held_by) if held_by else _judge(left, found, newest)

    print(f"{'running' if held_by else condition.name.lower().replace('_', ' ')}: {reason}")
    if newest and newest.manifest:
        manifest = newest.manifest
        print(f"newest complete checkpoint: {newest.path} ({manifest.position}, {manifest.saved_at})")
        if not verified and not held_by:
            size = format_bytes(manifest.bytes)
            print(f"  the checksums of its {size} were not verified; a run verifies them before it resumes")
    for one in found:
        if one.manifest is None:
            print(f"skipped: {one.path} {one.fault}")
    if held_by:
        return condition
    if left is not None and left.ended in (run_file.ASKED, run_file.STOPPED):
        print(f"last time: {left.message}")
    if newest is None and found:
        print("start over with: overwrite_output_dir=True resume_from_checkpoint=False, or another output_dir")
    elif condition is not Condition.FINISHED:
        first = "once that is fixed, " * (condition is Condition.BROKEN)
        print(f"{first}{'resume' if newest else 'start over'} with: {_command(left, directory)}")
    return condition


def _verified(found: Sequence[FoundCheckpoint]) -> tuple[list[FoundCheckpoint], bool]:
    """Reads what a run would read before it goes on, the newest first, as far as that is little. Incomplete and damaged
    ones come last; also returns whether the contents of the newest complete one are known to be what was saved."""
    damaged: list[FoundCheckpoint] = []
    bytes_left = COMPARED_BYTES
    for at, one in enumerate(found):
        bytes_left -= one.manifest.bytes if one.manifest else 0
        if one.manifest is None or bytes_left < 0:
            return [*found[at:], *damaged], False
        if (read := compared(one)).manifest is not None:
            return [*found[at:], *damaged], True
        damaged.append(read)
    return damaged, False


def _judge(
    run: RunFile | None, found: Sequence[FoundCheckpoint], newest: FoundCheckpoint | None
) -> tuple[Condition, str]:
    """The condition of a run that does not run, and why."""
    manifest = newest.manifest if newest else None
    if manifest and manifest.finished and not (run and run.serial > manifest.serial):  # else begun again: more epochs
        return Condition.FINISHED, str(manifest.position)
    if run is not None and run.ended == run_file.ERROR:
        return Condition.BROKEN, run.message
    if manifest is None and found:
        return Condition.BROKEN, "it has no intact checkpoint"
    return Condition.CAN_GO_ON, str(manifest.position) if manifest else "from the beginning, nothing is saved yet"


def _command(run: RunFile | None, directory: Path) -> str:
    here = directory.resolve()
    if run is None:
        return "the command that started it, with resume_from_checkpoint=auto"
    has_moved = run.output_dir and Path(run.folder, run.output_dir).resolve() != here
    elsewhere = f" {shlex.quote(f'output_dir={here}')}" if has_moved else ""
    return f"cd {shlex.quote(run.folder)} && {run.command}{elsewhere}"
