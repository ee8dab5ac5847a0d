"""Report whether a run is finished (exit status 0), can continue (75), or is broken and needs a fix (1).

Checks only the sizes of a checkpoint's files. A run also verifies their checksums before it resumes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from torchtune_adaptive.checkpoints.store import FoundCheckpoint, find_checkpoints
from torchtune_adaptive.formatting import printable
from torchtune_adaptive.lifecycle import run_state
from torchtune_adaptive.lifecycle.run_state import RunRecord, lock_holder


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
    run, active = run_state.read_record(directory), lock_holder(directory)
    try:
        found = find_checkpoints(directory)
    except OSError as error:
        return Condition.BROKEN, [f"{directory} cannot be read: {error.strerror or error}"]
    if run is None and not found:
        return Condition.BROKEN, [f"{directory} {'contains no run' if os.path.isdir(directory) else 'is not a folder'}"]
    condition, reason = _decide(run, active, found)
    lines = [f"running: {active}" if active else f"{condition.name.lower().replace('_', ' ')}: {reason}"]
    if found and (newest := found[0].manifest):
        lines.append(f"newest complete checkpoint: {found[0].path} ({newest.position}, {newest.saved_at})")
    lines += [f"skipped: {each.path} {each.fault}" for each in found if each.manifest is None]
    if not active:
        lines += _last_end(run, condition)
    if not active and condition is not Condition.FINISHED:
        lines.append(_remedy(found, condition))
    return condition, lines


def _decide(run: RunRecord | None, active: str | None, found: Sequence[FoundCheckpoint]) -> tuple[Condition, str]:
    """Return the condition and its reason: the first that applies."""
    newest = found[0].manifest if found else None
    position = str(newest.position) if newest else "from the beginning, no checkpoint is saved yet"
    # a run that was restarted later with more epochs begins with a higher serial
    is_last = newest is not None and newest.finished and (run is None or run.serial <= newest.serial)
    error = run.message if run and run.ended == run_state.ERROR else None
    conditions = (
        (active is not None, Condition.CAN_CONTINUE, position),
        (is_last, Condition.FINISHED, position),
        (error is not None, Condition.BROKEN, error or ""),
        (bool(found) and newest is None, Condition.BROKEN, "the run has no intact checkpoint"),
        (True, Condition.CAN_CONTINUE, position),
    )
    return next((condition, reason) for applies, condition, reason in conditions if applies)


def _last_end(run: RunRecord | None, condition: Condition) -> list[str]:
    """Return a line about how the run has ended last time, unless that is the reason for its condition."""
    if run and run.ended in (run_state.SIGNALLED, run_state.STOPPED):
        return [f"last time: {run.message}"]
    killed = run is not None and run.ended is None and condition is Condition.CAN_CONTINUE
    return ["last time: killed or crashed; later steps are not saved"] * killed


def _remedy(found: Sequence[FoundCheckpoint], condition: Condition) -> str:
    if found and found[0].manifest is None:
        return "start over with another output_dir, or remove this one"
    once_fixed = "once that is fixed, " * (condition is Condition.BROKEN)
    return f"{once_fixed}{'resume' if found else 'start over'} with: {run_state.SAME_COMMAND}"
