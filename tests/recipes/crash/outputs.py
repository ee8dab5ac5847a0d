"""The outputs of a run (checkpoints, log, record), compared with those of an undisturbed run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.recipes.crash.hook import PROBE, TIME, Point
from tests.recipes.crash.runs import EPOCHS, KEEP, STEPS, STEPS_PER_EPOCH, Life
from tests.timeline import read_timeline
from torchtune_adaptive.checkpoints.store import MANIFEST_FILE
from torchtune_adaptive.lifecycle.run_state import LOCK_FILE
from torchtune_adaptive.loop.metrics import VALIDATION

LAST_EPOCH = f"epoch_{EPOCHS - 1}"
END = re.compile(
    r"^(SIG\w+?)(?: on rank (\d))?: stopped (?:after step (\d+)|(.*)); "
    r"(?:last checkpoint: (\S+)\. To resume|nothing is saved\. To restart): .*resume_from_checkpoint=auto",
    re.M,
)


def complete_checkpoints(out: Path) -> dict[str, int]:
    """Map the names of complete checkpoints to their last steps."""
    found = {}
    for manifest in out.glob(f"*/{MANIFEST_FILE}"):
        folder = manifest.parent
        named = re.fullmatch(r"step_(\d+)|epoch_(\d+)", folder.name)
        if named and not folder.is_symlink():
            found[folder.name] = int(named[1]) if named[1] else (int(named[2]) + 1) * STEPS_PER_EPOCH
    return found


def lost_to_pruning(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the newest checkpoints that were complete and should have been kept but are missing."""
    newest = sorted((before | after).items(), key=lambda item: -item[1])[:KEEP]
    return [name for name, _ in newest if name in before and name not in after]


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of steps; validations have their own."""
    path = folder / "log.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line for line in lines if "loss" in line]


def logged_steps(folder: Path) -> list[int]:
    return [int(line["step"]) for line in read_log(folder)]


def differences(folder: Path, reference: Path) -> Iterator[str]:
    """Yield the differences from the undisturbed run in weights, figures, record and files."""
    ours, theirs = folder / "out" / LAST_EPOCH, reference / "out" / LAST_EPOCH
    patterns = ("model*.bin", "adapter*.pt", "value/model*.bin")
    names = sorted(str(path.relative_to(theirs)) for pattern in patterns for path in theirs.glob(pattern))
    assert names, f"no weights to compare in {theirs}"
    for name in names:
        if not (ours / name).exists():
            yield f"missing: {name}"
            continue
        one, other = (torch.load(path / name, weights_only=True) for path in (ours, theirs))
        unlike = [key for key in other if key not in one or not torch.equal(one[key], other[key])]
        if unlike or one.keys() != other.keys():
            yield f"{name}: {len(unlike)} of {len(other)} tensors differ, {unlike[:2]}"
    last, first = ({int(line["step"]): line for line in read_log(each)} for each in (folder, reference))
    figures = ("loss", "lr", "grad_norm", "microbatch_rows")
    if unlike := [step for step in last.keys() | first.keys() if not _same(last.get(step), first.get(step), figures)]:
        yield f"figures differ in steps {sorted(unlike)}"
    records = [read_timeline(each / "out") for each in (folder, reference)]
    if (steps := [line["step"] for line in records[0].steps]) != [*range(1, STEPS + 1)]:
        yield f"the record has steps {steps}"
    validations = [
        [(event["step"], event["val_loss"]) for event in each.events if event["kind"] == VALIDATION] for each in records
    ]
    if validations[0] != validations[1]:
        yield f"validations: {validations[0]} instead of {validations[1]}"
    for pattern in (".*", "*.tmp"):
        yield from (f"left behind: {path.name}" for path in ours.parent.glob(pattern) if path.name != LOCK_FILE)
    kept = sorted(complete_checkpoints(ours.parent))
    if LAST_EPOCH not in kept or len(kept) != KEEP:
        yield f"checkpoints kept: {kept}"


def _same(one: dict[str, Any] | None, other: dict[str, Any] | None, figures: tuple[str, ...]) -> bool:
    return one is not None and other is not None and all(one.get(name) == other.get(name) for name in figures)


def picture_of(out: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file except the lock, to detect changes."""
    stats = {str(path.relative_to(out)): path.lstat() for path in out.rglob("*") if path.name != LOCK_FILE}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def faults_of_a_stop(point: Point, life: Life, trained: int | None, saved: int) -> Iterator[str]:
    """Yield errors in the stop of a run that trained to step `trained`, if any, and whose newest checkpoint is step
    `saved`. Signals that arrive while Python still imports are lost.
    """
    ends = END.findall(life.output)
    if not ends and point.stage == TIME and trained is None:
        return
    if trained is not None and saved != trained:
        yield f"step {trained} was trained, but the newest checkpoint is of step {saved}"
    if len(ends) != 1 or "ended immediately" in life.output:
        yield f"printed {len(ends)} ends, or took one signal for two"
        return
    [(name, rank, step, moment, checkpoint)] = ends
    if not point.launcher and (name, rank) != (f"SIG{point.blow.split()[0]}", str(point.rank or "")):
        yield f"printed signal: {name} on rank {rank}"
    if point.stage == PROBE and not moment.startswith("during the search"):
        yield f"printed moment: {moment}"
    if (step, bool(checkpoint)) != (str(trained or ""), saved > 0):
        yield f"printed step {step} and checkpoint {checkpoint} after step {trained}, with step {saved} saved"
    if not life.cleanly and not point.launcher:
        yield "a signal to a rank is no failure, and the status is not 0"
