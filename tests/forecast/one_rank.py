"""A rank of a run, which writes down its steps: python -m tests.forecast.one_rank FOLDER STEPS recipe args"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from torchtune_adaptive.rehearse.step_writer import StepWriter

if __name__ == "__main__":
    _, folder, steps, recipe, *_ = sys.argv
    sys.argv = sys.argv[3:]
    with StepWriter(Path(folder) / f"rank{os.environ['RANK']}.jsonl", most_steps=int(steps)):
        runpy.run_module(recipe, run_name="__main__", alter_sys=True)
