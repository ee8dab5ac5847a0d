"""The example scripts for schedulers, with a fake scheduler and fake commands; `make crash` runs real training."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ranks import PATIENCE
from tests.recipes.running import COMMAND_MARK, end_marked, environment
from torchtune_adaptive.lifecycle import run_state

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = str(Path(sys.executable).parent)
FINISHED, BROKEN, CAN_CONTINUE = 0, 1, 75
NOT_BEGUN = -BROKEN
"""`status` reports it as broken too, because the run left no files."""
TRAINS = 'trap "echo asked >> {0}/log; exit 1" TERM; echo started >> {0}/log; for i in $(seq 200); do sleep 0.1; done'


EARLY = "trap 'case $BASH_COMMAND in run=*!) until [ -s {0}/log ]; do sleep 0.1; done; kill -s {1} $$;; esac' DEBUG"
"""Read by bash at its start: sends the signal after training has started and before the script knows its process ID."""


def write_commands(folder: Path, scripts: dict[str, str]) -> None:
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)


def kubernetes_script() -> str:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    [container] = pod["containers"]
    grace = int(next(each["value"] for each in container["env"] if each["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))
    assert grace < pod["terminationGracePeriodSeconds"]
    [script] = container["args"]
    return str(script)


@contextmanager
def started(command: list[str], commands: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with these commands first in PATH."""
    mark, path = uuid.uuid4().hex, os.pathsep.join([str(commands), SCRIPTS, os.environ["PATH"]])
    process = subprocess.Popen(command, env={**environment(), **variables, "PATH": path, COMMAND_MARK: mark})
    try:
        yield process
    finally:
        end_marked(COMMAND_MARK, mark)
        process.wait(20 * PATIENCE)


def wait_for(path: Path, lines: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s * PATIENCE
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{path} has not come to {lines} lines"
        time.sleep(0.05)


def begin(output_dir: Path, status: int) -> None:
    """Write the files of a run that has just started."""
    output_dir.mkdir()
    if status != NOT_BEGUN:
        run_state.write_record(output_dir, run_state.RunRecord(serial=0))


@pytest.mark.parametrize(
    ("status", "is_asked", "code", "requeued"),
    [
        (CAN_CONTINUE, True, 0, True),
        (CAN_CONTINUE, False, 1, False),
        (FINISHED, True, 0, False),
        (BROKEN, True, 1, False),
        (NOT_BEGUN, True, 0, True),
        (NOT_BEGUN, False, 1, False),
    ],
)
def test_slurm_requeues_only_runs_that_the_time_limit_ended(
    status: int, is_asked: bool, code: int, requeued: bool, tmp_path: Path
) -> None:
    commands = tmp_path / "commands"
    begin(tmp_path / "out", status)
    scripts = {
        "srun": 'exec "$@"',
        "tune": TRAINS.format(tmp_path) if is_asked else "exit 1",
        "tune-adaptive": f"exit {abs(status)}",
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol',
    }
    write_commands(commands, scripts)
    script = ["bash", str(EXAMPLES / "slurm.sbatch"), str(tmp_path / "out"), "recipe"]
    with started(script, commands, SLURM_JOB_ID="17") as job:
        if is_asked:
            wait_for(tmp_path / "log", 1, timeout_s=20)
            job.send_signal(signal.SIGUSR1)
        assert job.wait(20 * PATIENCE) == code
    if is_asked:
        assert (tmp_path / "log").read_text().splitlines() == ["started", "asked"]
    message = tmp_path / "scontrol"
    assert (message.read_text() if message.exists() else "") == "requeue 17\n" * requeued


@pytest.mark.parametrize(("status", "code"), [(CAN_CONTINUE, 138), (FINISHED, 0), (BROKEN, 1), (NOT_BEGUN, 138)])
def test_kubernetes_restarts_only_runs_that_can_continue(status: int, code: int, tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    begin(tmp_path / "out", status)
    state = f'[ "$2" = {tmp_path}/out ] && exit {abs(status)}'
    write_commands(commands, {"tune": TRAINS.format(tmp_path), "tune-adaptive": state})
    with started(["sh", "-c", kubernetes_script()], commands, OUTPUT_DIR=str(tmp_path / "out")) as pod:
        wait_for(tmp_path / "log", 1, timeout_s=20)
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(20 * PATIENCE) == code
    assert (tmp_path / "log").read_text().splitlines() == ["started", "asked"]


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_signal_during_start_up_is_forwarded_to_training(scheduler: str, tmp_path: Path) -> None:
    commands, out = tmp_path / "commands", str(tmp_path / "out")
    of_slurm = {"srun": 'exec "$@"', "scontrol": "true"}
    of_ours = {"tune": TRAINS.format(tmp_path), "tune-adaptive": f"exit {CAN_CONTINUE}"}
    write_commands(commands, of_slurm | of_ours)
    slurm = ["bash", str(EXAMPLES / "slurm.sbatch"), out, "recipe"], "USR1", 0
    command, number, code = slurm if scheduler == "slurm" else (["bash", "-c", kubernetes_script()], "TERM", 138)
    (tmp_path / "early").write_text(EARLY.format(tmp_path, number))
    given = {"BASH_ENV": str(tmp_path / "early"), "OUTPUT_DIR": out, "SLURM_JOB_ID": "17"}
    with started(command, commands, **given) as script:
        assert script.wait(20 * PATIENCE) == code
    assert (tmp_path / "log").read_text().splitlines() == ["started", "asked"]
