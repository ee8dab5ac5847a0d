"""In a job of GitHub Actions: annotate the lines that fail, and write the summary of the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_rehearsal.report.record import GIB
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.report.step_time import seconds_text
from gpu_rehearsal.sweep import SweepRow

_ESCAPED = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_OF_PROPERTIES = {**_ESCAPED, ":": "%3A", ",": "%2C"}
_HEADER = "| case | GPU | ranks | result | reserved, GiB | change, GiB | time per step |\n" + "|---" * 7 + "|\n"


def annotate(name: str, failures: Sequence[str], found: RehearsalResult, file: Path, line: int = 1) -> None:
    """Show the failures next to the line that needs too much memory or, if it is unknown, next to this one."""
    if failures and os.environ.get("GITHUB_ACTIONS") == "true":
        if error := found.out_of_memory or found.out_of_reduced:
            file, line = Path(error["file"]), error["line"]
        root = os.environ.get("GITHUB_WORKSPACE", os.curdir)
        place = f"file={_escape(os.path.relpath(file, root), _OF_PROPERTIES)},line={line}"
        text = _escape("\n".join(failures), _ESCAPED)
        # standard output may be JSON
        print(f"::error {place},title={_escape(name, _OF_PROPERTIES)}::{text}", file=sys.stderr, flush=True)


def write_summary(rows: Sequence[SweepRow]) -> None:
    """Append a Markdown table of the rows, and the reports of those that are not as expected."""
    if not (path := os.environ.get("GITHUB_STEP_SUMMARY")):
        return
    lines, reports = [], []
    for row in rows:
        text = "as expected" if not row.failures else f"**{row.failures[0]}**".replace("|", "\\|")
        peak, time = row.found.run_peaks["reserved_bytes"] / GIB, seconds_text(row.time.seconds) if row.time else ""
        grown = "" if row.grown_bytes is None or not row.fits else f"{row.grown_bytes / GIB:+.2f}"
        cells = row.name, row.gpu.name, row.found.ranks, text, f"{peak:.1f}", grown, time
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
        reports += [f"\n{row.name}:\n\n```\n{row.report}\n```\n"] * bool(row.failures)
    with Path(path).open("a", encoding="utf-8") as summary:
        summary.write("".join([_HEADER, *lines, *reports]))


def _escape(text: str, escapes: Mapping[str, str]) -> str:
    return "".join(escapes.get(each, each) for each in text)
