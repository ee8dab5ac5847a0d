"""Run a command on the GPUs of this machine, and compare the result with its rehearsal."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtune_adaptive.rehearse.result import GIB, RehearsalResult
from torchtune_adaptive.rehearse.start import checked, execute, interrupted_by_signals
from torchtune_adaptive.rehearse.step_time import seconds_text


def run_real(command: Sequence[str], steps: int) -> RehearsalResult:
    """Run a command, and return the result of the rank that ran out of memory, or else of the first one."""
    with interrupted_by_signals(), tempfile.TemporaryDirectory() as folder:
        variables = checked(os.environ, keep="CUDA_VISIBLE_DEVICES")
        ending = execute(["run_real", folder, str(steps), *command], variables)
        names = sorted((path.name for path in Path(folder).iterdir()), key=lambda name: (len(name), name))
        ranks = [name for name in names if name.isdecimal()] or names or ["none"]
        about: dict[str, Any] = {"usable_bytes": 0, "overhead_bytes": 0, "rank": 0, "ranks": 1, "real": True, **ending}
        results = [RehearsalResult.read(Path(folder) / name, **about) for name in ranks]
    peaks = [{"rank": each.rank, **each.run_peaks} for each in results]
    found = next((each for each in results if each.out_of_memory), results[0])
    return replace(found, rank_peaks=peaks)


FIGURES = "allocated_bytes", "reserved_bytes", "seconds"


def differences(rehearsed: RehearsalResult, real: RehearsalResult) -> list[dict[str, Any]]:
    """Return both figures of each step that both have, and their differences as shares of the real figures."""
    rows = []
    for first, second in zip(rehearsed.steps, real.steps, strict=False):
        row: dict[str, Any] = {"step": second["step"]}
        for name in FIGURES:
            is_time = name == "seconds"
            one = rehearsed.seconds_of(first) if is_time else first[name]
            other = real.seconds_of(second) if is_time else second[name]
            row[name] = {"rehearsed": one, "real": other, "difference": one / other - 1 if one and other else None}
        rows.append(row)
    return rows


def side_by_side(rehearsed: RehearsalResult, real: RehearsalResult) -> str:
    """Return a table of the steps with the figures of both."""
    lines = [f"rehearsed: {rehearsed.verdict()}", f"real:      {real.verdict()}", ""]
    lines += ["".join([" " * 6, *(f"{name:>32}" for name in ("allocated, GiB", "reserved, GiB", "time"))])]
    lines += ["  step" + f"{'rehearsed':>13}{'real':>10}{'':>9}" * len(FIGURES)]
    for row in differences(rehearsed, real):
        cells = [f"{row['step']:>6}"]
        for name in FIGURES:
            for which, width in ("rehearsed", 13), ("real", 10):
                value = row[name][which]
                text = seconds_text(value) if name == "seconds" and value else f"{value / GIB:.2f}" if value else ""
                cells.append(f"{text:>{width}}")
            share = row[name]["difference"]
            cells.append(f"{'' if share is None else f'{share:+.1%}':>9}")
        lines.append("".join(cells))
    how = "calibrated" if rehearsed.gpu and rehearsed.gpu.is_calibrated else "not calibrated: run --calibrate"
    lines += ["", f"the rehearsed time is an estimate ({how}); the first step has no measured time"]
    return "\n".join(line.rstrip() for line in lines)


def both_as_json(rehearsed: RehearsalResult, real: RehearsalResult) -> str:
    """Return both results and their differences."""
    both = {name: json.loads(found.as_json()) for name, found in (("rehearsed", rehearsed), ("real", real))}
    return json.dumps({**both, "differences": differences(rehearsed, real)}, indent=2)
