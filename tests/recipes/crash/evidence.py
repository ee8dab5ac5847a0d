"""What a run leaves behind, beside what the undisturbed run has left; and what has come of all kills and signals."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.recipes.crash.variants import EPOCHS, KEEP, STEPS, STEPS_PER_EPOCH
from torchtune_adaptive.checkpoints.store import MANIFEST_FILE
from torchtune_adaptive.life.output_lock import LOCK_FILE
from torchtune_adaptive.report.journal import STEPS_FILE, read_timeline

LAST_EPOCH = f"epoch_{EPOCHS - 1}"


def complete_checkpoints(out: Path) -> dict[str, int]:
    """Name -> last step, of the folders that count as checkpoints."""
    found = {}
    for manifest in out.glob(f"*/{MANIFEST_FILE}"):
        folder = manifest.parent
        named = re.fullmatch(r"step_(\d+)|(?:dist_)?epoch_(\d+)", folder.name)
        if named and not folder.is_symlink():
            found[folder.name] = int(named[1]) if named[1] else (int(named[2]) + 1) * STEPS_PER_EPOCH
    return found


def lost_to_pruning(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Of the newest checkpoints that are kept, those that were complete and are gone."""
    newest = sorted((before | after).items(), key=lambda item: -item[1])[:KEEP]
    return [name for name, _ in newest if name in before and name not in after]


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def logged_steps(folder: Path) -> list[int]:
    return [int(line["step"]) for line in read_lines(folder / "log.jsonl")]


def differences(folder: Path, reference: Path) -> list[str]:
    """What is not as the undisturbed run has left it."""
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
    """The last KEEP stay."""
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
    """The figures of every step, as they were when it last was trained."""
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
    """Size and time of every file but the lock, to see whether anything is touched."""
    stats = {str(path.relative_to(out)): path.lstat() for path in out.rglob("*") if path.name != LOCK_FILE}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@dataclass
class Tally:
    killed: int = 0
    by_tune_run: int = 0
    """Of those killed."""
    stopped: int = 0
    """Ended by a signal that may be heard, and not finished."""
    stopped_by_tune_run: int = 0
    resumed: int = 0
    """After a kill or a signal."""
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    not_begun: list[str] = field(default_factory=list)
    """For which there was no time left."""
    steps_lost: Counter[str] = field(default_factory=Counter)
    """The most by name of the variant."""
    too_many_lost: list[str] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    """Where runs were struck, with numbers left out."""

    def kill(self, where: str, *, tune_run: bool) -> None:
        self.killed += 1
        self.by_tune_run += tune_run
        self.places[place(where)] += 1

    def stop(self, where: str, *, tune_run: bool) -> None:
        self.stopped += 1
        self.stopped_by_tune_run += tune_run
        self.places[f"asked at {place(where)}"] += 1

    def lose(self, case: str) -> None:
        print(f"LOST {case}", flush=True)
        self.lost.append(case)

    def fault(self, case: str) -> None:
        print(f"WRONG {case}", flush=True)
        self.wrong.append(case)

    def steps(self, variant: str, lost: int, at_risk: int, how: str) -> None:
        self.steps_lost[variant] = max(self.steps_lost[variant], lost)
        if lost > at_risk:
            self.too_many_lost.append(f"{how}: {lost} steps, at most {at_risk} may be")

    def add(self, other: Tally) -> None:
        """What has come of other runs."""
        for name, value in vars(other).items():
            if name == "steps_lost":
                self.steps_lost |= value
            else:
                setattr(self, name, getattr(self, name) + value)

    @property
    def good(self) -> bool:
        all_resumed = self.killed + self.stopped == self.resumed
        return all_resumed and not (self.lost or self.wrong or self.too_many_lost or self.not_begun)

    def summary(self) -> str:
        waited = max((lost for name, lost in self.steps_lost.items() if not name.startswith("async")), default=0)
        on_its_way = max((lost for name, lost in self.steps_lost.items() if name.startswith("async")), default=0)
        return (
            f"killed {self.killed} ({self.by_tune_run} by tune run), stopped by signals {self.stopped} "
            f"({self.stopped_by_tune_run} by tune run), resumed {self.resumed}, "
            f"lost {len(self.lost)}, wrong {len(self.wrong)}, steps lost at most {waited} "
            f"(asynchronous: {on_its_way})"
        )

    def details(self) -> list[str]:
        return [
            *(f"LOST {case}" for case in self.lost),
            *(f"WRONG {case}" for case in self.wrong),
            *(f"TOO MANY STEPS {case}" for case in self.too_many_lost),
            *(f"NOT BEGUN {case}" for case in self.not_begun),
        ]


def place(where: str) -> str:
    """What kind of place it is: `rename epoch_N`."""
    label = re.sub(r"^(start|train|last-save):\d+ ", r"\1 ", where)
    return re.sub(r"[0-9a-f]{8,}|\d+(\.\d+)?", "N", label)
