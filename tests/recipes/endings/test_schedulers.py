"""The example scripts for schedulers, with a fake scheduler; `make crash` runs real training.

tests/launchers validates them with the schedulers' own packages.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_rehearsal.command import parser_of_command

from tests.ranks import PATIENCE
from tests.recipes.running import COMMAND_MARK, end_marked, environment
from torchtune_adaptive.lifecycle import run_state

EXAMPLES = Path(__file__).parents[3] / "examples" / "launchers"
FINISHED, BROKEN, CAN_CONTINUE = 0, 1, 75
NOT_BEGUN = -BROKEN
"""`status` reports it as broken too, because the run left no files."""
TRAINS = 'trap "echo asked >> {0}/log; exit 1" TERM; echo started >> {0}/log; for i in $(seq 200); do sleep 0.1; done'
EARLY = "trap 'case $BASH_COMMAND in run=*!) until [ -s {0}/log ]; do sleep 0.1; done; kill -s {1} $$;; esac' DEBUG"
"""Read by bash at its start: sends the signal after training has started and before the script knows its process ID."""
SLURM, KUBERNETES = signal.SIGUSR1, signal.SIGTERM
"""The signal of each scheduler."""
AGAIN, NOT_AGAIN = True, False
TIME_IS_OVER, EARLY_SIGNAL, FAILS = "time is over", "time is over during the start", "training fails"


def kubernetes_script() -> str:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    [container] = pod["containers"]
    grace = int(next(each["value"] for each in container["env"] if each["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))
    assert grace < pod["terminationGracePeriodSeconds"]
    [script] = container["args"]
    return str(script)


@pytest.mark.parametrize(
    ("scheduler", "event", "status", "code", "again"),
    [
        (SLURM, TIME_IS_OVER, CAN_CONTINUE, 0, AGAIN),
        (SLURM, FAILS, CAN_CONTINUE, 1, NOT_AGAIN),
        (SLURM, TIME_IS_OVER, FINISHED, 0, NOT_AGAIN),
        (SLURM, TIME_IS_OVER, BROKEN, 1, NOT_AGAIN),
        (SLURM, TIME_IS_OVER, NOT_BEGUN, 0, AGAIN),
        (SLURM, FAILS, NOT_BEGUN, 1, NOT_AGAIN),
        (SLURM, EARLY_SIGNAL, CAN_CONTINUE, 0, AGAIN),
        # Kubernetes starts a pod again after status 138
        *((KUBERNETES, TIME_IS_OVER, status, 138, NOT_AGAIN) for status in (CAN_CONTINUE, NOT_BEGUN)),
        *((KUBERNETES, TIME_IS_OVER, status, status, NOT_AGAIN) for status in (FINISHED, BROKEN)),
        (KUBERNETES, EARLY_SIGNAL, CAN_CONTINUE, 138, NOT_AGAIN),
    ],
)
def test_only_runs_that_the_scheduler_ended_and_that_can_continue_start_again(
    scheduler: signal.Signals, event: str, status: int, code: int, again: bool, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    out.mkdir()
    if status != NOT_BEGUN:
        run_state.write_record(out, run_state.RunRecord(serial=0))
    scripts = {
        "srun": 'exec "$@"',
        "tune": "exit 1" if event == FAILS else TRAINS.format(tmp_path),
        "tune-adaptive": f'[ "$2" = {out} ] && exit {abs(status)}',
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol',
    }
    variables = {"OUTPUT_DIR": str(out), "SLURM_JOB_ID": "17", COMMAND_MARK: (mark := uuid.uuid4().hex)}
    variables["PATH"] = stub_commands(tmp_path, **scripts)
    if event == EARLY_SIGNAL:
        (tmp_path / "early").write_text(EARLY.format(tmp_path, scheduler.name.removeprefix("SIG")))
        variables["BASH_ENV"] = str(tmp_path / "early")
    of_slurm = ["bash", str(EXAMPLES / "slurm.sbatch"), str(out), "recipe"]
    command = of_slurm if scheduler == SLURM else ["bash", "-c", kubernetes_script()]
    job = subprocess.Popen(command, env={**environment(), **variables})
    try:
        if event == TIME_IS_OVER:
            deadline = time.monotonic() + 20 * PATIENCE
            while not log.exists() or not log.read_text():
                assert time.monotonic() < deadline, "training has not started"
                time.sleep(0.05)
            job.send_signal(scheduler)
        assert job.wait(20 * PATIENCE) == code
    finally:
        end_marked(COMMAND_MARK, mark)
        job.wait(20 * PATIENCE)
    assert event == FAILS or log.read_text().splitlines() == ["started", "asked"]
    asked = tmp_path / "scontrol"
    assert (asked.read_text() if asked.exists() else "") == "requeue 17\n" * again


TRAINS_TWO_RANKS = """
import os, signal, sys, time, torch, torch.distributed as dist

stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
dist.init_process_group("gloo")
first = int(open("step").read()) if os.path.exists("step") else 0
for step in range(first, 3):
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        open("log", "a").write(f"step {step} of {total.item():.0f} ranks: {sys.argv[1]}\\n")
    while first == 0 and step == 1 and not stop:
        time.sleep(0.05)
    if stop:
        open("step", "w").write(str(step + 1))
        sys.exit(1)
"""


def test_slurm_job_continues_on_all_ranks_after_its_time_limit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS_TWO_RANKS)
    path = stub_commands(
        tmp_path, srun='exec "$@"', scontrol=f"[ $1 = show ] && echo localhost || echo $* >> {tmp_path}/asked"
    )
    job = ["bash", str(EXAMPLES / "slurm_torchrun.sbatch"), "train.py", "--rows 8"]
    variables = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "n0",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
    }
    mark = {COMMAND_MARK: uuid.uuid4().hex}
    start = partial(subprocess.Popen, job, cwd=tmp_path, env={**environment(), **variables, **mark, "PATH": path})
    try:
        running = start()
        deadline = time.monotonic() + 60 * PATIENCE
        while not (tmp_path / "log").exists() or "step 1" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline, "training has not started"
            time.sleep(0.05)
        running.send_signal(signal.SIGUSR1)
        assert running.wait(60 * PATIENCE) == 0
        assert (tmp_path / "asked").read_text() == f"requeue {os.getpid()}\n"
        assert start().wait(60 * PATIENCE) == 0
    finally:
        end_marked(COMMAND_MARK, mark[COMMAND_MARK])
    steps = [f"step {step} of 2 ranks: --rows 8" for step in range(3)]
    assert (tmp_path / "log").read_text().splitlines() == steps


def test_slurm_queues_training_behind_a_rehearsal_of_all_ranks(tmp_path: Path) -> None:
    path = stub_commands(tmp_path, sbatch=f"printf '%s\\n' \"$@\" >> {tmp_path}/asked; echo 17")
    script = EXAMPLES / "slurm_rehearse_then_train.sh"
    variables = {"PATH": path, "NODES": "2", "GPU": "a100"}
    words = ["bash", script, "train.py", "--text", "a b"]
    subprocess.run(words, env={**os.environ, **variables}, check=True, timeout=60)
    asked = (tmp_path / "asked").read_text().splitlines()
    (wrapped,) = (line.removeprefix("--wrap=") for line in asked if line.startswith("--wrap="))
    options = parser_of_command().parse_args(shlex.split(wrapped)[1:])
    assert (options.gpu, options.ranks, options.words) == (["a100"], [16], ["--", "train.py", "--text", "a b"])
    assert "--dependency=afterok:17" in asked
    assert asked[-4:] == [str(EXAMPLES / "slurm_torchrun.sbatch"), "train.py", "--text", "a b"]


def stub_commands(folder: Path, **scripts: str) -> str:
    """Write commands into a folder, and return a PATH that begins with it."""
    (commands := folder / "commands").mkdir()
    for name, script in scripts.items():
        (commands / name).write_text(f"#!/bin/bash\n{script}\n")
        (commands / name).chmod(0o755)
    return os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
