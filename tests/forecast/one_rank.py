"""One rank of a run that records its steps: python -m tests.forecast.one_rank FOLDER STEPS recipe args

Without computation, measured speed is meaningless; as in a rehearsal, a trial keeps the smaller size.
"""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

from torchtune_adaptive.engine.results import AttemptReports
from torchtune_adaptive.rehearse.step_recorder import StepRecorder

if __name__ == "__main__":
    _, folder, steps, recipe, *_ = sys.argv
    sys.argv = sys.argv[3:]
    alike = mock.patch.object(AttemptReports, "rate", 1.0)
    with alike, StepRecorder(Path(folder) / f"rank{os.environ['RANK']}.jsonl", most_steps=int(steps)):
        runpy.run_module(recipe, run_name="__main__", alter_sys=True)
