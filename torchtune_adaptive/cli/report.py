"""Draw a picture of a run, which may still be active, or have failed.

tune-adaptive report runs/mine
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtune_adaptive.errors import AdaptiveError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument("output_dir", type=Path, help="the output_dir of a run")
    parser.add_argument("--output", type=Path, metavar="PNG_FILE", help="default: adaptive_report.png in output_dir")


def run(options: argparse.Namespace) -> int:
    """Draw the picture and print its path."""
    # imported here, because they need numpy, and `ls`, `cp` and `status` do not
    from torchtune_adaptive.report.journal import STEPS_FILE, read_timeline
    from torchtune_adaptive.report.pictures import REPORT_FILE, draw

    timeline = read_timeline(options.output_dir)
    if not timeline.steps:
        raise AdaptiveError(f"no step is recorded in {options.output_dir / STEPS_FILE}; name the output_dir of a run")
    path = options.output or options.output_dir / REPORT_FILE
    try:
        draw(options.output_dir, timeline, path)
    except ImportError as error:
        raise AdaptiveError("a picture needs matplotlib: pip install matplotlib") from error
    print(path)
    return 0
