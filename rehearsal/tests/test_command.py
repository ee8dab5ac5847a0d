"""Options of the command, and what it prints if the machine is at fault."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from gpu_rehearsal import progress
from gpu_rehearsal.command import main
from tests.conftest import Rehearse
from tests.processes import skip_without_null_device
from tests.scripts import ONE_STEP


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("variables", "words", "expected"),
    [
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, (), "only torch's own caching allocator can be rehearsed"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, (), "only torch's own caching allocator"),
        ({}, ("--rank", "1"), "there is no rank 1: the last of 1 is 0"),
        ({}, ("--memory", "1GB"), "the GPU has 0.931 GiB, of which 1.3 GiB are not for tensors"),
        ({}, ("--memory", "80"), "memory is '80': pass an amount of memory, for example 24GiB"),
        ({}, ("--gpu", "h1000"), "unknown GPU 'h1000'"),
        ({}, ("--ranks", "0"), "argument --ranks: 0 is not a whole number from 1"),
        ({}, ("--ranks", "1,x"), "x is not a whole number from 1"),
        ({}, ("--steps", "-1"), "argument --steps: -1 is not a whole number from 0"),
        ({}, ("--devices", "17"), "argument --devices: invalid choice: 17"),
        ({}, ("--fixed", "12=512"), "argument --fixed: 12=512 is not a line and a number, as in train.py:12=512"),
        ({}, ("--", "deepspeed", "--num_gpus", "8", "train.py"), "cannot be followed: rehearse train.py "),
        ({}, ("--price", "h100"), "argument --price: h100 is not a list of prices per GPU and hour"),
        ({}, ("--price", "l4=1", "--gpu", "h100"), "--price has l4, which --gpu does not compare"),
        ({}, ("--jobs", "2"), "--jobs needs --cases"),
        ({}, ("--update-peaks",), "--update-peaks needs --cases"),
        ({}, ("--cases", "fits.toml", "--gpu", "4090"), "--cases reads gpu from its file"),
        ({}, ("--cases", "fits.toml"), "--cases reads the command from its file"),
    ],
)
def test_invalid_options_are_refused_before_the_script_runs(
    variables: dict[str, str], words: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    skip_without_null_device()
    (tmp_path / "train.py").write_text("raise ValueError")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main([*words, "--", str(tmp_path / "train.py")])
    assert left.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


def test_torch_that_cannot_be_imported_is_named(rehearse: Rehearse, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    shutil.copy(Path(torch.__file__).with_name("version.py"), tmp_path / "torch")
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart is missing')")
    answer = rehearse(ONE_STEP, variables={"PYTHONPATH": str(tmp_path)})
    assert (answer.status, answer.found["fits"]) == (2, None)
    assert "ImportError: libcudart is missing" in answer.found["verdict"]


def test_unwritable_report_is_an_error(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    with Path("/dev/full").open("w") as full:
        to_full = {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: run(*args, **kwargs | to_full))
        answer = rehearse(ONE_STEP, status=2)
    assert answer.printed.splitlines()[-1].startswith("error: stdout: No space left on device")


@pytest.mark.smoke
def test_shell_completes_options(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("rehearse")
    script = f'eval "$({program} --completion)"; complete -p rehearse'
    completed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {"--ranks", "--price", "--version"} <= {*completed}
    assert "--batch-size" not in completed  # of an example


WAITS = """
    import sys, time, torch

    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.zeros(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        time.sleep(float(sys.argv[1]) * ("H100" in torch.cuda.get_device_name()))
"""


def test_lines_on_standard_error_show_which_rehearsals_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    skip_without_null_device()
    monkeypatch.setattr(progress, "EVERY_S", 0.2)
    (tmp_path / "train.py").write_text(dedent(WAITS))
    with pytest.raises(SystemExit) as left:
        main(["--gpu", "4090,h100", "--format", "json", "--", str(tmp_path / "train.py"), "1"])
    printed = capfd.readouterr()
    assert left.value.code == 0
    assert [row["gpu"] for row in json.loads(printed.out)] == ["4090", "h100"]
    assert re.search(r"(?m)^rehearse: .*rehearsal 2 of 2, h100, step 3, \d+ s$", printed.err)


def test_interrupted_comparison_prints_the_rows_that_have_ended(tmp_path: Path) -> None:
    skip_without_null_device()
    (tmp_path / "train.py").write_text(dedent(WAITS))
    words = (str(Path(sys.executable).with_name("rehearse")), "--gpu", "4090,h100", "--", "train.py", "600")
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        row = next(line for line in job.stderr or () if line.startswith("4090"))
        job.send_signal(signal.SIGTERM)
        table, errors = job.communicate(timeout=60)
    assert row.startswith("4090, 1 rank: fits: 0.04 of 22.3 GiB reserved")
    assert job.returncode == 130
    assert [line.split()[:3] for line in table.splitlines()[1:2]] == [["4090", "1", "yes"]]
    assert "interrupted: 1 of 2 cases not rehearsed" in errors
