"""Report whether a run is finished (exit status 0), can continue (75), or is broken and needs a fix (1).

Checks only the sizes of a checkpoint's files. A run also verifies their checksums before it resumes.
"""

from __future__ import annotations

import argparse
import os
import shlex
from enum import IntEnum
from pathlib import Path

from torchtune_adaptive.checkpoints.store import find_checkpoints
from torchtune_adaptive.formatting import printable
from torchtune_adaptive.lifecycle import run_state
from torchtune_adaptive.lifecycle.run_state import lock_holder


class Condition(IntEnum):
    """The condition of a run. Its value is the exit status."""

    FINISHED = 0
    BROKEN = 1
    CAN_CONTINUE = 75
    """EX_TEMPFAIL of sysexits.h: start the command again later. This is also the status of an active run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `status`."""
    parser.add_argument("output_dir", type=Path, help="the output_dir of the run")


def run(options: argparse.Namespace) -> int:
    """Print the condition of a run, and return it as the exit status."""
    condition, lines = condition_of(options.output_dir)
    print("\n".join(map(printable, lines)))  # escaped, because another user may have written the folder
    return condition


def condition_of(directory: Path) -> tuple[Condition, list[str]]:
    """Return the condition of a run and the lines to print."""
    run = run_state.read_record(directory)
    active, found = lock_holder(directory), find_checkpoints(directory)
    if run is None and not found:
        return Condition.BROKEN, [f"{directory} {'contains no run' if os.path.isdir(directory) else 'is not a folder'}"]
    newest = found[0] if found and found[0].manifest else None
    if newest is not None and newest.manifest is not None:
        position, is_last = str(newest.manifest.position), newest.manifest.finished
        is_last &= run is None or run.serial <= newest.serial  # if not, the run was restarted later with more epochs
    else:
        position, is_last = "from the beginning, no checkpoint is saved yet", False
    if active is not None or is_last:
        condition, reason = (Condition.CAN_CONTINUE if active else Condition.FINISHED), position
    elif run is not None and run.ended == run_state.ERROR:
        condition, reason = Condition.BROKEN, run.message
    elif newest is None and found:
        condition, reason = Condition.BROKEN, "the run has no intact checkpoint"
    else:
        condition, reason = Condition.CAN_CONTINUE, position
    lines = [f"running: {active}" if active else f"{condition.name.lower().replace('_', ' ')}: {reason}"]
    if newest is not None and newest.manifest is not None:
        lines.append(f"newest complete checkpoint: {newest.path} ({position}, {newest.manifest.saved_at})")
    lines += [f"skipped: {each.path} {each.fault}" for each in found if each.manifest is None]
    if active:
        return condition, lines
    if run is not None and run.ended in (run_state.SIGNALLED, run_state.STOPPED):
        lines.append(f"last time: {run.message}")
    elif run is not None and run.ended is None and condition is Condition.CAN_CONTINUE:
        lines.append("last time: killed or crashed; later steps are not saved")
    if newest is None and found:
        lines.append("start over with another output_dir, or remove this one")
    elif condition is not Condition.FINISHED:
        once_fixed = "once that is fixed, " * (condition is Condition.BROKEN)
        unknown_command = "the command that started it, with resume_from_checkpoint=auto"
        command = f"cd {shlex.quote(run.folder)} && {run.command}" if run else unknown_command
        if run and os.path.realpath(run.output_dir) != os.path.realpath(directory):  # it was copied or moved
            command += f" output_dir={shlex.quote(os.path.abspath(directory))}"
        lines.append(f"{once_fixed}{'resume' if newest else 'start over'} with: {command}")
    return condition, lines
