"""A file of cases: commands × GPUs × numbers of ranks with their expectations, for `rehearse --cases` (docs/ci.md)."""

from __future__ import annotations

import inspect
import json
import resource
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from torchtune_adaptive.atomic_files import reason, replace_file
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import did_you_mean, format_bytes, in_columns, printable
from torchtune_adaptive.rehearse.expectations import Expectations, Peak, RecordedPeaks, peak_of, report
from torchtune_adaptive.rehearse.gpus import gpu_named
from torchtune_adaptive.rehearse.interface import GPU, rehearse
from torchtune_adaptive.rehearse.result import RehearsalResult
from torchtune_adaptive.rehearse.sweep import SweepRow, in_parallel

_EXPECTED = {each.name for each in fields(Expectations)}
_KEYS = {"name", *_EXPECTED, *inspect.signature(rehearse).parameters} - {"quiet", "snapshot"}


class Case(NamedTuple):
    """A command on one GPU and one number of ranks."""

    name: str
    options: Mapping[str, Any]
    """Arguments of `rehearse`."""
    expected: Expectations


class Ended(NamedTuple):
    """How a case has ended."""

    found: RehearsalResult | None
    """None if the rehearsal could not start."""
    failures: Sequence[str]
    """The expectations that are not met, or the error."""
    cpu_s: float
    recorded: Peak | None = None

    @property
    def result(self) -> str:
        """The result in one or two words."""
        answered = self.found is not None and self.found.answer is not None
        return "ok" if not self.failures else "FAILED" if answered else "NO ANSWER"

    @property
    def text(self) -> str:
        """The failures and the report."""
        return report(self.failures, self.found, self.recorded) if self.found else "\n".join(self.failures)


def read_cases(path: Path) -> list[Case]:
    """Read a file of cases. Raise a ConfigError if it is invalid."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {reason(error)}") from error
    cases = list[Case]()
    if unknown := {*content} - {"defaults", "case"}:
        raise ConfigError(f"{path}: unknown table {min(unknown)!r}: a file has [defaults] and [[case]]")
    for at, entry in enumerate(content.get("case", []), 1):
        given = {**content.get("defaults", {}), **entry}
        try:
            cases += _expand(given)
        except ConfigError as error:
            raise ConfigError(f"{path}: case {given.get('name', at)}: {error}") from error
    names = [case.name for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{path}: two cases are named {min(twice)!r}: give each a name")
    if not cases:
        raise ConfigError(f"{path} has no [[case]]")
    return cases


def _expand(given: Mapping[str, Any]) -> list[Case]:
    """Return a case for each combination of GPU and ranks."""
    if unknown := sorted({*given} - _KEYS):
        raise ConfigError(f"unknown key {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}")
    if not isinstance(command := given.get("command"), str):
        raise ConfigError("a command is needed, in one string")
    expected = Expectations(**{name: given[name] for name in given if name in _EXPECTED})
    options = {name: given[name] for name in given if name not in (*_EXPECTED, "name", "gpu", "ranks")}
    cases = []
    for ranks, gpu in product(*(_several(given.get(key, default)) for key, default in (("ranks", None), ("gpu", GPU)))):
        gpu_named(str(gpu))
        name = f"{given.get('name', command)}, {gpu}" + (f" × {ranks}" if ranks else "")
        cases.append(Case(name, {**options, "gpu": str(gpu), "ranks": ranks}, expected))
    return cases


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def run_cases(
    path: Path, *, shard: tuple[int, int] = (1, 1), jobs: int = 1, junit: str = "", update_peaks: bool = False,
    as_json: bool = False,
) -> int:  # fmt: skip
    """Rehearse the cases of a file, or every N-th of them, print a table, and return the exit status."""
    cases, peaks = (
        {case.name: case for case in read_cases(path)[shard[0] - 1 :: shard[1]]},
        RecordedPeaks(_beside(path)),
    )
    recorded, ended = peaks.read(), dict[str, Ended]()
    for name, (found, cpu_s) in in_parallel(_rehearse, {name: (case,) for name, case in cases.items()}, jobs):
        expected = cases[name].expected
        if isinstance(found, str):
            ended[name] = Ended(None, [found], cpu_s)
            continue
        if update_peaks and found.fits and expected.growth_percent is not None:
            recorded[name] = peak_of(found)
        ended[name] = Ended(found, expected.failures(found, recorded.get(name)), cpu_s, recorded.get(name))
    ended = {name: ended[name] for name in cases}
    if update_peaks:
        peaks.update({name: recorded[name] for name in cases if name in recorded})
    if junit:
        replace_file(Path(junit), _junit(path.name, ended))
    print(json.dumps(_as_json(ended), indent=2) if as_json else _as_text(ended))
    return max({"ok": 0, "FAILED": 1, "NO ANSWER": 2}[each.result] for each in ended.values()) if ended else 0


def _beside(path: Path) -> Path:
    return path.with_suffix(".peaks.json")


def _rehearse(case: Case) -> tuple[RehearsalResult | str, float]:
    """Rehearse a case. An error is its result, so that it does not end the other cases."""
    begin_s = _cpu_s()
    try:
        found: RehearsalResult | str = rehearse(**case.options, quiet=True)
    except Exception as error:  # noqa: BLE001
        found = f"no answer: {reason(error)}"
    return found, _cpu_s() - begin_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _as_text(ended: Mapping[str, Ended]) -> str:
    """Return a table of all cases, and a report of each that has failed."""
    lines: list[Sequence[object]] = [("case", "result", "allocated", "reserved, of", "change", "rows", "CPU s")]
    for name, each in ended.items():
        cells = [""] * 4
        if (found := each.found) and found.answer is not None:
            before = each.recorded["allocated_bytes"] if each.recorded else None
            change = None if before is None else found.run_peaks["allocated_bytes"] - before
            allocated, reserved = (format_bytes(found.run_peaks[f"{kind}_bytes"]) for kind in ("allocated", "reserved"))
            cells = [allocated, f"{reserved}, {format_bytes(found.usable_bytes)}"]
            cells += ["" if change is None else f"{change / 2**30:+.2f} GiB", str(found.most_rows or "")]
        lines.append((name, each.result, *cells, f"{each.cpu_s:.1f}"))
    failed = [f"{name}: {each.text}" for name, each in ended.items() if each.failures]
    total = f"{len(ended)} cases, {len(failed)} not as expected, {sum(each.cpu_s for each in ended.values()):.0f} CPU s"
    return "\n\n".join([f"{in_columns(lines)}\n{total}", *failed])


def _as_json(ended: Mapping[str, Ended]) -> list[dict[str, Any]]:
    rows = []
    for name, each in ended.items():
        row = SweepRow(each.found.gpu, each.found).as_dict() if each.found and each.found.gpu else {}
        rows.append({"name": name, "result": each.result, "failures": each.failures, "cpu_s": each.cpu_s, **row})
    return rows


def _junit(name: str, ended: Mapping[str, Ended]) -> bytes:
    tags = {"FAILED": "failure", "NO ANSWER": "error"}
    suite = ElementTree.Element("testsuite", name=name, tests=str(len(ended)))
    for result, tag in tags.items():
        suite.set(f"{tag}s", str(sum(each.result == result for each in ended.values())))
    for case, each in ended.items():
        element = ElementTree.SubElement(suite, "testcase", classname=name, name=case, time=f"{each.cpu_s:.1f}")
        if each.failures:
            text = "\n".join(map(printable, each.text.splitlines()))
            ElementTree.SubElement(element, tags[each.result], message=printable(each.failures[0])).text = text
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))
