"""One rank of a run that records its steps: python -m tests.rehearse.recipes.one_rank FOLDER STEPS recipe args"""

import os
import runpy
import sys
from pathlib import Path

from torchtune_adaptive.rehearse.start import RankSettings
from torchtune_adaptive.rehearse.step_recorder import StepRecorder

if __name__ == "__main__":
    _, folder, steps, recipe, *_ = sys.argv
    sys.argv = sys.argv[3:]
    with StepRecorder(Path(folder) / f"rank{os.environ['RANK']}.jsonl", RankSettings(steps=int(steps))):
        runpy.run_module(recipe, run_name="__main__", alter_sys=True)
