"""A rank of a run, which writes down its steps: python -m tests.forecast.one_rank FOLDER STEPS recipe args

Where nothing is computed, speeds mean nothing: as in a rehearsal, of two sizes the smaller one stays.
"""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

from torchtune_adaptive.engine.reports import Reports
from torchtune_adaptive.rehearse.step_writer import StepWriter

if __name__ == "__main__":
    _, folder, steps, recipe, *_ = sys.argv
    sys.argv = sys.argv[3:]
    alike = mock.patch.object(Reports, "rate", 1.0)
    with alike, StepWriter(Path(folder) / f"rank{os.environ['RANK']}.jsonl", most_steps=int(steps)):
        runpy.run_module(recipe, run_name="__main__", alter_sys=True)
