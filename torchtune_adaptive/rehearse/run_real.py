"""Run a script on the GPUs of this machine and record its steps: `python -m ...run_real FOLDER STEPS script args`.

Each rank writes a record, named after its number. A launcher's ranks run this module, too.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed.run

from torchtune_adaptive.rehearse.fake_ranks import replace, replace_simple_launcher
from torchtune_adaptive.rehearse.run_script import run, run_recorded
from torchtune_adaptive.rehearse.start import CannotRehearse, end_with_parent, program_of
from torchtune_adaptive.rehearse.step_recorder import StepRecorder

ALONE = "alone"
"""Name of the record of a process that is not a launcher's rank."""


def main(folder: str, steps: str, *command: str) -> None:
    """Run the command, and end this process with its exit status."""
    end_with_parent()  # a launcher starts ranks in other process groups
    if not sys.flags.safe_path:
        del sys.path[0]  # the script's folder belongs there
    start_ranks = torch.distributed.run.run

    def start_recorded_ranks(args: Namespace) -> None:
        script = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        args.module, args.training_script = True, __spec__.name
        args.training_script_args = [folder, steps, *script]
        start_ranks(args)

    def run_on_gpu() -> None:
        if not torch.cuda.device_count():
            raise CannotRehearse("torch finds no GPU on this machine: leave out --real and --compare")
        run(command)

    replace(start_ranks, start_recorded_ranks)
    if program_of(command).startswith(("accelerate", "trl")):
        replace_simple_launcher(run)
    record = Path(folder) / os.environ.get("RANK", ALONE)
    run_recorded(StepRecorder(record, most_steps=int(steps), real=True), run_on_gpu)


if __name__ == "__main__":
    main(*sys.argv[1:])
