"""A file of cases: commands × GPUs × numbers of ranks with their expectations, for `rehearse --cases` (docs/ci.md)."""

from __future__ import annotations

import inspect
import json
import sys
import tomllib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from gpu_rehearsal.ci.expectations import (
    OF_FITTING,
    Expectations,
    RecordedPeak,
    peak_of,
    read_peaks,
    report,
    update_peaks,
)
from gpu_rehearsal.ci.github import annotate, write_summary
from gpu_rehearsal.errors import ConfigError
from gpu_rehearsal.files import reason
from gpu_rehearsal.formatting import count_of, did_you_mean, is_whole, printable
from gpu_rehearsal.gpus import Gpu, gpu_named
from gpu_rehearsal.interface import GPU, rehearse
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.sweep import SweepRow, as_table, in_parallel, range_in

_KEYS = {"name", *inspect.signature(Expectations).parameters, *inspect.signature(rehearse).parameters} - {"quiet"}


class Case(NamedTuple):
    """A command on one GPU and one number of ranks."""

    name: str
    gpu: Gpu
    ranks: int | None
    options: Mapping[str, Any]
    """The other arguments of `rehearse`."""
    expected: Expectations


def read_cases(path: Path) -> list[Case]:
    """Read a file of cases. Raise a ConfigError if it is invalid."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {reason(error)}") from error
    defaults, entries, cases = content.get("defaults", {}), content.get("case"), list[Case]()
    known = {*content} <= {"defaults", "case"}
    if not (known and entries and type(entries) is list and all(type(each) is dict for each in (defaults, *entries))):
        has = f"{path} has {', '.join(map(printable, content)) or 'no case'}"
        raise ConfigError(f"{has}: write [[case]] above the keys of each case, [defaults] above those of all cases")
    if unknown := sorted({*defaults} - _KEYS):
        raise ConfigError(f"{path}: [defaults] has an unknown key {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}")
    for at, entry in enumerate(entries, 1):
        try:
            cases += _expand(defaults, entry)
        except ConfigError as error:
            raise ConfigError(f"{path}: case {entry.get('name', at)}: {error}") from error
    names = [case.name for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{path}: two cases are named {min(twice)!r}: give each a name")
    return cases


def _expand(defaults: Mapping[str, Any], entry: Mapping[str, Any]) -> list[Case]:
    """Return a case for each combination of GPU and ranks."""
    given = {**defaults, **entry}
    if unknown := sorted({*entry} - _KEYS):
        raise ConfigError(f"unknown key {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}")
    if not isinstance(command := given.get("command"), str):
        raise ConfigError("a command is needed, in one string")
    # defaults are for cases that fit, and growth_percent is for cases whose peaks can be compared
    excluded = ["growth_percent"] * bool(range_in([command])) if given.get("fits", True) else OF_FITTING
    given = {name: given[name] for name in given if name in entry or name not in excluded}
    expected = Expectations.of(given, command)
    options = {name: given[name] for name in given if name not in {*vars(expected), "name", "gpu", "ranks"}}
    cases = []
    for ranks, gpu in product(_several(given, "ranks", None), _several(given, "gpu", GPU)):
        if ranks is not None and not is_whole(ranks, at_least=1):
            raise ConfigError(f"ranks has {ranks!r}: a whole number from 1, or a list of such numbers, is needed")
        name = printable(f"{given.get('name', command)}, {gpu}")
        name += f" × {ranks}" if isinstance(given.get("ranks"), list) else ""
        cases.append(Case(name, gpu_named(str(gpu)), ranks, options, expected))
    return cases


def _several(given: Mapping[str, Any], name: str, default: str | None) -> list[Any]:
    if (value := given.get(name, default)) == []:
        raise ConfigError(f"{name} is an empty list: name at least one, or leave it out")
    return value if isinstance(value, list) else [value]


def run_cases(path: Path, jobs: int, update: bool, *, as_json: bool) -> int:
    """Rehearse the cases of a file, print a table, and return the exit status."""
    cases = {case.name: case for case in read_cases(path)}
    if update and all(case.expected.growth_percent is None for case in cases.values()):
        raise ConfigError(f"--update-peaks: no case of {path} has growth_percent: set it, for example in [defaults]")
    peaks, recorded = path.with_suffix(".peaks.json"), read_peaks(path.with_suffix(".peaks.json"))
    given = {name: (case, None if update else recorded.get(name)) for name, case in cases.items()}
    ended, unwritten, interrupted = dict[str, SweepRow](), "", False
    try:
        for name, found in in_parallel(_rehearse, given, jobs):
            print(f"{name}: {found.verdict()}", file=sys.stderr, flush=True)
            if found.output:
                print(f"output of {name}:", found.output, sep="\n", file=sys.stderr)
            expected = cases[name].expected
            if update and found.fits and expected.growth_percent is not None:
                recorded[name] = peak_of(found)
                try:
                    update_peaks(peaks, {name: recorded[name]})
                except OSError as error:
                    unwritten = f"error: {peaks} cannot be written: {reason(error)}"
            failures, before = expected.failures(found, recorded.get(name)), recorded.get(name)
            text = report(failures, found, before) if failures else ""
            annotate(name, failures, found, path)
            grown = found.run_peaks["reserved_bytes"] - before["reserved_bytes"] if before else None
            ended[name] = SweepRow(cases[name].gpu, found, name, failures, text, grown)
    except KeyboardInterrupt:
        interrupted = True
    rows = [ended[name] for name in cases if name in ended]
    write_summary(rows)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        failed = [f"{row.name}: {row.report}" for row in rows if row.failures]
        cpu_s = sum(row.found.cpu_s for row in rows)
        total = f"{count_of(len(rows), 'case')}, {len(failed)} not as expected, {cpu_s:.0f} CPU s"
        noted = [f"recorded the peaks in {peaks}; commit this file"] * (update and not unwritten)
        print(as_table(rows), total, *noted, *failed, sep="\n\n")
    if unwritten:
        print(unwritten, file=sys.stderr)
    if interrupted:
        print(f"interrupted: {len(cases) - len(rows)} of {count_of(len(cases), 'case')} not rehearsed", file=sys.stderr)
        raise KeyboardInterrupt
    return max([0, 2 * bool(unwritten), *(2 if row.fits is None else 1 for row in rows if row.failures)])


def _rehearse(case: Case, recorded: RecordedPeak | None) -> RehearsalResult:
    """Return the result of a case. An error is a result, so that it does not end the others."""
    given = {"gpu": case.gpu, "ranks": case.ranks, **case.options}
    try:
        found = rehearse(**given, quiet=True)
        return case.expected.find_growth(found, recorded, lambda **other: rehearse(**{**given, **other}))
    except Exception as error:  # noqa: BLE001
        return RehearsalResult(0, 0, 0, case.ranks or 1, status=1, message=f"CannotRehearse: {reason(error)}")
