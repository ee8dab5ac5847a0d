"""Run a command on the GPUs of this machine, and compare the result with its rehearsal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtune_adaptive.rehearse.result import GIB, RehearsalResult
from torchtune_adaptive.rehearse.start import RankSettings, execute, interrupted_by_signals, script_environment
from torchtune_adaptive.rehearse.step_time import seconds_text


def run_real(command: Sequence[str], settings: RankSettings) -> RehearsalResult:
    """Run a command, and return the result of the first rank that failed, or else of the fullest."""
    with interrupted_by_signals(), tempfile.TemporaryDirectory() as folder:
        settings = settings._replace(real=True)
        ending = execute(folder, settings, command, script_environment(os.environ, keep="CUDA_VISIBLE_DEVICES"))
        return RehearsalResult.read_ranks(Path(folder), usable_bytes=0, overhead_bytes=0, real=True, **ending)


FIGURES = "allocated_bytes", "reserved_bytes", "seconds"


class Comparison(NamedTuple):
    """The results of a rehearsal and of a run on the same GPU."""

    rehearsed: RehearsalResult
    real: RehearsalResult

    def differences(self) -> list[dict[str, Any]]:
        """Return the figures of each step in both runs, and their difference as a fraction of the real figure."""
        rows = []
        for rehearsed, real in zip(self.rehearsed.timed_steps, self.real.timed_steps, strict=False):
            row: dict[str, Any] = {"step": real["step"]}
            for name in FIGURES:
                one, other = rehearsed[name], real[name]
                row[name] = {"rehearsed": one, "real": other, "difference": one / other - 1 if one and other else None}
            rows.append(row)
        return rows

    def as_text(self) -> str:
        """Return both verdicts, and a table of the steps with the figures of both."""
        lines = [f"rehearsed: {self.rehearsed.verdict()}", f"real:      {self.real.verdict()}", ""]
        lines += [" " * 6 + "".join(f"{name:>32}" for name in ("allocated, GiB", "reserved, GiB", "time"))]
        lines += ["  step" + f"{'rehearsed':>13}{'real':>10}{'':>9}" * len(FIGURES)]
        for row in self.differences():
            cells = [f"{row['step']:>6}"]
            for name in FIGURES:
                for value, width in (row[name]["rehearsed"], 13), (row[name]["real"], 10):
                    text = "" if value is None else seconds_text(value) if name == "seconds" else f"{value / GIB:.2f}"
                    cells.append(f"{text:>{width}}")
                share = row[name]["difference"]
                cells.append(f"{'' if share is None else f'{share:+.1%}':>9}")
            lines.append("".join(cells))
        lines += ["", "the rehearsed time is an estimate; the first step has no measured time"]
        return "\n".join(line.rstrip() for line in lines)

    def as_dict(self) -> dict[str, Any]:
        """Return both results and their differences, for JSON."""
        both = {name: found.as_dict() for name, found in self._asdict().items()}
        return {**both, "differences": self.differences()}
