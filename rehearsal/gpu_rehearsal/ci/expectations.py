"""What a project expects of a rehearsal, and the recorded peaks with which later rehearsals are compared."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gpu_rehearsal.errors import ConfigError
from gpu_rehearsal.files import read_json, replace_file
from gpu_rehearsal.formatting import format_bytes, in_columns, is_whole, parse_bytes
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.sweep import range_in

RecordedPeak = Mapping[str, Any]
"""A recorded peak: allocated_bytes, reserved_bytes and by_kind."""
MEASURES = "allocated", "reserved"


OF_FITTING = "allocated_below", "reserved_below", "at_least", "growth_percent"
"""The expectations that only a script that fits can meet."""


@dataclass(frozen=True, kw_only=True)
class Expectations:
    """What is expected of a rehearsal."""

    fits: bool = True
    """False: the script runs out of memory."""
    allocated_below: str | int | None = None
    """An upper limit of the peak of allocated memory, for example 70GiB."""
    reserved_below: str | int | None = None
    """The same of reserved memory."""
    at_least: int | None = None
    """The largest value of a range in the command, or the rows that a recipe's search finds, must be at least this."""
    growth_percent: float | None = None
    """The peaks may be at most this many percent higher than the recorded ones."""

    def __post_init__(self) -> None:
        for name in "allocated_below", "reserved_below":
            if (limit := getattr(self, name)) is not None:
                parse_bytes(limit, name)
        if self.at_least is not None and not is_whole(self.at_least, at_least=1):
            raise ConfigError(f"at_least is {self.at_least!r}: a whole number from 1 is needed")
        if type(self.fits) is not bool:
            raise ConfigError(f"fits is {self.fits!r}: true or false is needed")
        growth = self.growth_percent
        if growth is not None and (type(growth) not in (int, float) or not 0 <= growth < float("inf")):
            raise ConfigError(f"growth_percent is {growth!r}: a number from 0 is needed")
        if not self.fits and (limits := [name for name in OF_FITTING if getattr(self, name) is not None]):
            raise ConfigError(f"{limits[0]} is for scripts that fit: leave it out, or fits = false")

    @classmethod
    def of(cls, given: Mapping[str, Any], command: str | Sequence[str]) -> Expectations:
        """Return the expectations among the arguments of a rehearsal of this command."""
        expected = cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given})
        if expected.growth_percent is not None and range_in([command] if isinstance(command, str) else command):
            raise ConfigError("growth_percent cannot compare a range: state at_least instead, or use a fixed value")
        return expected

    def failures(self, found: RehearsalResult, recorded: RecordedPeak | None) -> list[str]:
        """Return a line for each expectation that is not met."""
        if found.fits != self.fits:
            fitted = [f"{_size(recorded[f'{name}_bytes'])} {name}" for name in MEASURES if recorded]
            known = [f"the recorded peak, with which it fitted: {', '.join(fitted)}"] * bool(
                fitted and found.fits is False
            )
            return ["fits, but should not"] if found.fits else [found.verdict(), *known]
        failed, peaks = list[str](), found.run_peaks
        for name in MEASURES:
            limit, peak = getattr(self, f"{name}_below"), peaks[f"{name}_bytes"]
            if limit is not None and peak >= (limit := parse_bytes(limit, name)):
                failed.append(f"{_size(peak)} {name}, {_size(peak - limit)} above {name}_below ({_size(limit)})")
            before = recorded[f"{name}_bytes"] if recorded else peak
            if self._has_grown(found, recorded, name):
                percent = f" ({100 * (peak / before - 1):.1f} %)" if before else ""
                failed.append(
                    f"{_size(peak - before)}{percent} more {name} than the recorded {_size(before)}; growth_percent is "
                    f"{self.growth_percent:g}. If this is intended, run once with --update-peaks"
                )
        if error := found.out_of_reduced:
            at = f"{error['file']}:{error['line']}: {error['source']}"
            failed.append(f"with {_size(error['allowed_bytes'])}, step {error['step']} runs out of memory at {at}")
        if self.at_least is not None and (found.most_rows or 0) < self.at_least:
            rows = "nothing was searched" if found.most_rows is None else f"{found.most_rows} fit"
            failed.append(f"{rows}; at_least is {self.at_least}")
        if self.growth_percent is not None and recorded is None:
            failed.append("no peak is recorded: run once with --update-peaks, and commit the file")
        return failed

    def find_growth(
        self, found: RehearsalResult, recorded: RecordedPeak | None, repeat: Callable[..., RehearsalResult]
    ) -> RehearsalResult:
        """If the allocated peak has grown too much, rehearse with half of the growth, to find a line that needs it."""
        if not recorded or not found.fits or not self._has_grown(found, recorded, "allocated"):
            return found
        usable = (found.run_peaks["allocated_bytes"] + recorded["allocated_bytes"]) // 2
        is_set = (conf := "PYTORCH_ALLOC_CONF") in os.environ
        os.environ.setdefault(conf, "expandable_segments:True")  # so that memory does not run out by fragmentation
        try:
            again = repeat(
                memory=usable + found.overhead_bytes, memory_overhead=found.overhead_bytes, once=True, quiet=True
            )
        finally:
            if not is_set:
                del os.environ[conf]
        return replace(found, out_of_reduced=again.out_of_memory or {}, cpu_s=found.cpu_s + again.cpu_s)

    def _has_grown(self, found: RehearsalResult, recorded: RecordedPeak | None, name: str) -> bool:
        return recorded is not None and found.run_peaks[f"{name}_bytes"] > recorded[f"{name}_bytes"] * self._growth

    @property
    def _growth(self) -> float:
        """The allowed peak as a multiple of the recorded one."""
        return float("inf") if self.growth_percent is None else 1 + self.growth_percent / 100


def peak_of(found: RehearsalResult) -> RecordedPeak:
    """Return the peak to record."""
    return {**found.run_peaks, "by_kind": found.peak_by_kind}


def change_by_kind(found: RehearsalResult, recorded: RecordedPeak) -> str:
    """Return a table of the recorded peak and the present one."""
    now = peak_of(found)
    lines = [(kind, recorded["by_kind"].get(kind, 0), now["by_kind"].get(kind, 0)) for kind in now["by_kind"]]
    lines += [(f"{name} in all", recorded[f"{name}_bytes"], now[f"{name}_bytes"]) for name in MEASURES]
    cells = [(name, _size(before), _size(after), after - before) for name, before, after in lines]
    rows = [(*cell, f"{'+' * (more > 0)}{_size(more)}" * bool(more)) for *cell, more in cells]
    return in_columns([("peak", "recorded", "now", "change"), *rows])


def report(failures: Sequence[str], found: RehearsalResult, recorded: RecordedPeak | None) -> str:
    """Return the failures, the change of the peak, and the report of the rehearsal, which begins with the verdict."""
    failed = "\n".join(each for each in failures if each != found.verdict())
    change = change_by_kind(found, recorded) if recorded and found.fits else ""
    return "\n\n".join(filter(None, [failed, change, found.as_text()]))


def read_peaks(path: Path) -> dict[str, RecordedPeak]:
    """Return the recorded peaks by name; none if there is no file."""
    try:
        peaks = read_json(path) or {}
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}; correct or remove it") from error
    for name, peak in peaks.items():
        kinds = peak.get("by_kind") if isinstance(peak, dict) else None
        sizes = [peak.get(f"{each}_bytes") for each in MEASURES] + [*kinds.values()] if type(kinds) is dict else [None]
        if any(type(size) is not int for size in sizes):
            raise ConfigError(f"{path}: the peak of {name!r} is damaged: remove it, and run once with --update-peaks")
    return peaks


def update_peaks(path: Path, peaks: Mapping[str, RecordedPeak]) -> None:
    """Replace the recorded peaks of these names. Names are sorted, so that a change is a readable diff."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # other processes of pytest may update other names
        content = json.dumps({**read_peaks(path), **peaks}, indent=2, sort_keys=True)
        replace_file(path, f"{content}\n".encode())
    finally:
        os.close(folder)


def _size(count: float) -> str:
    return format_bytes(count, 2)
