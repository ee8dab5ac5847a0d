"""Write the figures of a benchmark: a table, and JSON with machine and versions."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

from torchtune_adaptive.atomic_files import replace_file

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "torchtune",
    "torchao",
    "accelerate",
    "pytorch-lightning",
    "transformers",
)

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """The measurements of a benchmark."""

    rows: Sequence[Row]
    """Rows of the JSON."""
    note: str
    """Explains the figures and their limits."""
    shown: Sequence[Row] | None = None
    """The rows of the table, if they differ from those of the JSON."""

    def __str__(self) -> str:
        return f"{table(self.shown or self.rows)}\n{self.note}"


def compared(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the ratio of the second of each pair to the first; the two were measured in turns."""
    ratios = [second / first for first, second in pairs]
    return {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "pairs": len(ratios)}


def table(rows: Sequence[Row]) -> str:
    """Format rows as aligned columns; floats have three decimals, and None is empty."""
    header = list(rows[0])
    cells = [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def save(name: str, rows: Sequence[Row], note: str = "") -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"machine": machine(), "note": note, "rows": rows}
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def machine() -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: found for package in PACKAGES if (found := _version(package)) is not None},
    }


def _processor() -> str:
    """Return the model of the processor from /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
