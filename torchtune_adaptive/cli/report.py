"""Draw a picture of a run, or compare several runs. A run may still be active, or have failed.

tune-adaptive report runs/mine
tune-adaptive report runs/mine runs/other --output comparison.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtune_adaptive.errors import AdaptiveError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument("output_dir", type=Path, nargs="+", help="the output_dir of a run")
    default = "default: adaptive_report.png, in the folder of a single run, or else in the current folder"
    parser.add_argument("--output", type=Path, metavar="PNG_FILE", help=default)


def run(options: argparse.Namespace) -> int:
    """Draw the picture and print its path."""
    # imported here, because they need numpy, and `ls`, `cp` and `status` do not
    from torchtune_adaptive.report.journal import STEPS_FILE, read_timeline
    from torchtune_adaptive.report.pictures import REPORT_FILE, RUN_COLORS, draw

    runs = {directory: read_timeline(directory) for directory in options.output_dir}
    for directory, timeline in runs.items():
        if not timeline.steps:
            raise AdaptiveError(f"no step is recorded in {directory / STEPS_FILE}; name the output_dir of a run")
    if len(runs) > len(RUN_COLORS):
        raise AdaptiveError(f"{len(runs)} runs are too many for one picture; compare at most {len(RUN_COLORS)}")
    path = options.output or (next(iter(runs)) if len(runs) == 1 else Path()) / REPORT_FILE
    try:
        draw(runs, path)
    except ImportError as error:
        raise AdaptiveError("a picture needs matplotlib: pip install matplotlib") from error
    print(path)
    return 0
