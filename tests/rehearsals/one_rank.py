"""One rank of a run that records its steps: python -m tests.rehearsals.one_rank FOLDER STEPS recipe args"""

import os
import runpy
import sys
from pathlib import Path

from gpu_rehearsal.recording.steps import StepRecorder
from gpu_rehearsal.settings import RankSettings

if __name__ == "__main__":
    _, folder, steps, recipe, *_ = sys.argv
    sys.argv = sys.argv[3:]
    with StepRecorder(Path(folder) / f"rank{os.environ['RANK']}.jsonl", RankSettings(steps=int(steps))):
        runpy.run_module(recipe, run_name="__main__", alter_sys=True)
