"""The outputs of a run (checkpoints, log, record), compared with those of an undisturbed run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.recipes.crash.variants import EPOCHS, KEEP, STEPS, STEPS_PER_EPOCH
from tests.timeline import read_timeline
from torchtune_adaptive.checkpoints.store import MANIFEST_FILE
from torchtune_adaptive.lifecycle.run_state import LOCK_FILE
from torchtune_adaptive.report.journal import STEPS_FILE

LAST_EPOCH = f"epoch_{EPOCHS - 1}"


def complete_checkpoints(out: Path) -> dict[str, int]:
    """Map the names of complete checkpoints to their last steps."""
    found = {}
    for manifest in out.glob(f"*/{MANIFEST_FILE}"):
        folder = manifest.parent
        named = re.fullmatch(r"step_(\d+)|(?:dist_)?epoch_(\d+)", folder.name)
        if named and not folder.is_symlink():
            found[folder.name] = int(named[1]) if named[1] else (int(named[2]) + 1) * STEPS_PER_EPOCH
    return found


def lost_to_pruning(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the newest checkpoints that were complete and should have been kept but are missing."""
    newest = sorted((before | after).items(), key=lambda item: -item[1])[:KEEP]
    return [name for name, _ in newest if name in before and name not in after]


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def logged_steps(folder: Path) -> list[int]:
    return [int(line["step"]) for line in read_lines(folder / "log.jsonl")]


def differences(folder: Path, reference: Path) -> list[str]:
    """Return the differences from the undisturbed run."""
    return [
        *_different_weights(folder / "out" / LAST_EPOCH, reference / "out" / LAST_EPOCH),
        *_different_figures(folder, reference),
        *_different_record(folder / "out"),
        *[f"left behind: {path.name}" for path in _left_behind(folder / "out")],
        *_badly_kept(folder / "out"),
    ]


def _left_behind(out: Path) -> Iterator[Path]:
    yield from (path for pattern in (".*", "*.tmp") for path in out.glob(pattern) if path.name != LOCK_FILE)


def _badly_kept(out: Path) -> Iterator[str]:
    """Yield an error unless the last KEEP checkpoints remain."""
    kept = sorted(complete_checkpoints(out))
    if LAST_EPOCH not in kept or len(kept) != KEEP:
        yield f"checkpoints kept: {kept}"


def _different_weights(ours: Path, theirs: Path) -> list[str]:
    found = []
    patterns = ("model*.bin", "adapter*.pt", "value/model*.bin")
    names = sorted(str(path.relative_to(theirs)) for pattern in patterns for path in theirs.glob(pattern))
    assert names, f"no weights to compare in {theirs}"
    for name in names:
        if not (ours / name).exists():
            found.append(f"missing: {ours.name}/{name}")
            continue
        one, other = (torch.load(path / name, weights_only=True) for path in (ours, theirs))
        unlike = [key for key in other if key not in one or not torch.equal(one[key], other[key])]
        if unlike or one.keys() != other.keys():
            found.append(f"{name}: {len(unlike)} of {len(other)} tensors differ, {unlike[:2]}")
    return found


def _different_figures(folder: Path, reference: Path) -> list[str]:
    """Compare the figures of every step, using its last training."""
    last = {int(line["step"]): line for line in read_lines(folder / "log.jsonl")}
    first = {int(line["step"]): line for line in read_lines(reference / "log.jsonl")}
    if sorted(last) != sorted(first):
        return [f"steps logged: {sorted(last)}"]
    unlike = [
        step
        for step, figures in first.items()
        if any(figures[name] != last[step].get(name) for name in ("loss", "lr", "grad_norm"))
    ]
    return [f"figures differ from step {unlike[0]} on"] if unlike else []


def _different_record(out: Path) -> list[str]:
    steps = [record["step"] for record in read_timeline(out).steps]
    return [] if steps == list(range(1, STEPS + 1)) else [f"{STEPS_FILE} has steps {steps}"]


def picture_of(out: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file except the lock, to detect changes."""
    stats = {str(path.relative_to(out)): path.lstat() for path in out.rglob("*") if path.name != LOCK_FILE}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
