"""What every benchmark does with its figures: a table for people, JSON with machine and versions for comparison."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned columns; floats with three digits behind the point."""
    header = list(rows[0])
    cells = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)


def save(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return path


def machine() -> dict[str, Any]:
    packages = ("torch", "torchtune", "torchao")
    return {
        "date": date.today().isoformat(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
