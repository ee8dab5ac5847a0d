"""`rehearse`: run an unmodified training script as one rank of many on simulated GPUs, to predict memory.

`start` runs the script in a process with a null device (a simulated GPU, see `null_cuda`). `processes` forks it from
one that has imported torch and replaced some of its functions (`run_script`). `fake_ranks` replaces the other ranks, or
`together` forks them.
`device_values` supplies the values that the script reads from the GPU, and `step_recorder` writes a record of each
step. `result` reads the records.
"""

from gpu_rehearsal.interface import rehearse
from gpu_rehearsal.report.result import RehearsalResult

__all__ = ["RehearsalResult", "rehearse"]
