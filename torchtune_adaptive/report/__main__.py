"""Draw `adaptive_report.png` for a run, which may still be running or have failed.

python -m torchtune_adaptive.report OUTPUT_DIR
"""

import argparse
import logging
from pathlib import Path

from torchtune_adaptive.report.journal import read_timeline
from torchtune_adaptive.report.pictures import draw_run


def main() -> None:
    """Draw the picture and print its path."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_adaptive.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output_dir", type=Path, help="the output_dir of the run")
    directory = parser.parse_args().output_dir
    logging.basicConfig(format="%(message)s")  # warnings about unreadable lines or missing matplotlib
    logging.getLogger("torchtune_adaptive").setLevel(logging.INFO)
    timeline = read_timeline(directory)
    if not timeline.steps:
        why = f"the run in {directory} has not finished a step" if timeline.events else f"{directory} contains no run"
        parser.exit(1, f"cannot draw a picture: {why}\n")
    path = draw_run(directory, timeline)
    parser.exit(0 if path else 1, f"{path}\n" if path else None)


if __name__ == "__main__":
    main()
