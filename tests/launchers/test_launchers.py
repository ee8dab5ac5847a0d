"""The examples for SkyPilot, Kubeflow and TorchX are valid for these packages; nothing is submitted."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "examples" / "launchers"


def test_skypilot_accepts_the_task() -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(LAUNCHERS / "skypilot.yaml"))
    assert {frozenset(each.accelerators.items()) for each in task.resources} == {
        frozenset({(name, 8)}) for name in ("H100", "A100-80GB")
    }
    assert all(each.use_spot for each in task.resources)
    assert [*task.storage_mounts] == ["/checkpoints"]


def test_kubeflow_accepts_the_job() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    given = yaml.safe_load((LAUNCHERS / "trainjob.yaml").read_text())
    job = models.TrainerV1alpha1TrainJob.from_dict(given)
    assert job.to_dict() == given  # an unknown key would be missing
    runtime = given["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod, (limit,) = runtime["template"]["spec"]["template"]["spec"], given["spec"]["trainer"]["env"]
    assert int(limit["value"]) < pod["terminationGracePeriodSeconds"]


def test_torchx_prints_the_job_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("torchx")
    page = (ROOT / "docs" / "launchers.md").read_text()
    (command,) = re.findall(r"^    torchx (run .*)$", page, re.MULTILINE)
    (tmp_path / "train.py").write_text("")
    words = shlex.split(command.replace("run ", "run --dryrun ", 1))
    torchx = [sys.executable, "-m", "torchx.cli.main", *words]
    printed = subprocess.run(torchx, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert printed.returncode == 0, printed.stderr
    assert re.search("srun .*torchrun .* --nnodes 2 --nproc_per_node 8 .*train.py --rows 8", printed.stdout)
    assert re.search(r"#SBATCH .*--gpus-per-task=8", printed.stdout), printed.stdout
