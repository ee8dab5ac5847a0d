"""Run an unmodified training script on simulated GPUs: does it fit, how long does a step take, does it hang?

The folders, in the order in which a rehearsal passes through them:

- `command.py` (`rehearse ...`) and `interface.py` (`rehearse(...)`) check the arguments. `repeating.py` rehearses again
  with random values, and `sweep.py` compares GPUs or searches the largest value that fits.
- `processes/` starts the script: as one rank, with fake process groups for the others, or all ranks together.
- `device/` is the simulated GPU: a library in C in place of CUDA's.
- `values/` supplies the numbers that the script reads from the GPU.
- `recording/` writes a record of each step, of its work, and of the calls of each rank.
- `hangs/` replays the calls of all ranks, and explains which ranks wait for each other.
- `report/` reads the record, and writes the verdict and the report.
- `ci/` compares rehearsals with what a project expects: a pytest plugin, and files of cases.
- `adapters.py` lets another package say what a rehearsal replaces in it.
"""

from gpu_rehearsal.interface import rehearse
from gpu_rehearsal.report.result import RehearsalResult

__version__ = "0.2.0"
__all__ = ["RehearsalResult", "rehearse"]
