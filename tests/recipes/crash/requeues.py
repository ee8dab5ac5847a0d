"""examples/slurm.sbatch under a scheduler that is not real, which ends every job before its run is done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.ranks import PATIENCE
from tests.recipes.crash import evidence
from tests.recipes.crash.tally import Tally
from tests.recipes.crash.variants import Variant, write_config
from tests.recipes.crash.victims import Start, tune_command, tune_environment
from tests.recipes.running import COMMAND_MARK, end_marked
from torchtune_adaptive.cli.status import Condition, judge, look

SCRIPT = Path(__file__).parents[3] / "examples" / "slurm.sbatch"
LEAST_REQUEUED, MOST_REQUEUED = 1, 12
JOB_S = 150


def requeued(variant: Variant, folder: Path, reference: Path, times: Iterator[int]) -> Tally:
    """The run, in as many jobs as it takes, each of which is told after so many steps that its time is over."""
    tally, how = Tally(), f'--only "requeues", {variant}'
    command = tune_command(Start(variant, folder, tuple(write_config(variant, folder))))[2:]
    commands = _commands_of_the_scheduler(folder)
    code, jobs = 0, 0
    while jobs == _requeues(folder) and jobs <= MOST_REQUEUED:
        ends_after = len(evidence.logged_steps(folder)) + next(times)
        code = _job(["bash", str(SCRIPT), str(folder / "out"), *command], commands, folder, ends_after)
        jobs += 1
        print(f"  {how}: job {jobs} ended with status {code} after {evidence.logged_steps(folder)[-1:]}", flush=True)
    tally.requeued = _requeues(folder)
    condition, reason = judge(look(folder / "out"))
    if code != 0 or condition is not Condition.FINISHED or not LEAST_REQUEUED <= tally.requeued <= MOST_REQUEUED:
        tally.lose(f"{how}: {jobs} jobs, status {code}, {reason}\n{(folder / 'output').read_text(errors='replace')}")
        return tally
    if evidence.logged_steps(folder) != evidence.logged_steps(reference):
        tally.fault(f"{how}: trained steps {evidence.logged_steps(folder)}")
    for each in evidence.differences(folder, reference):
        tally.fault(f"{how}: {each}")
    return tally


def _commands_of_the_scheduler(folder: Path) -> Path:
    commands = folder / "commands"
    commands.mkdir(parents=True)
    for name, line in (("srun", 'exec "$@"'), ("scontrol", f'echo "$@" >> {folder}/scontrol')):
        (commands / name).write_text(f"#!/bin/bash\n{line}\n")
        (commands / name).chmod(0o755)
    return commands


def _requeues(folder: Path) -> int:
    told = folder / "scontrol"
    return len(told.read_text().splitlines()) if told.exists() else 0


def _job(command: list[str], commands: Path, folder: Path, steps: int) -> int:
    """Its exit status. Its time is over once so many steps have been logged in all."""
    mark, path = (
        uuid.uuid4().hex,
        os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
    )
    variables = {**tune_environment([], mark), "PATH": path, "SLURM_JOB_ID": "17"}
    with (folder / "output").open("a") as output:
        job = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + JOB_S * PATIENCE
            while job.poll() is None and len(evidence.logged_steps(folder)) < steps and time.monotonic() < deadline:
                time.sleep(0.02)
            with suppress(ProcessLookupError):
                job.send_signal(signal.SIGUSR1)
            return job.wait(JOB_S * PATIENCE)
        finally:
            end_marked(COMMAND_MARK, mark)
            job.wait(10)
