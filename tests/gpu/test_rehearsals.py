"""A rehearsal compared with the real card."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.one_card import CASES, LENGTHS

ROOT = Path(__file__).parents[2]


def peaks(*command: str) -> list[list[int]]:
    """Return allocated and reserved bytes by step."""
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout[-3000:]
    lines = ended.stdout.splitlines()  # a rehearsal prints its result on stdout and the script's output on stderr
    return [json.loads(line.removeprefix("peak ")) for line in lines if line.startswith("peak ")]


@pytest.mark.real_gpu
@pytest.mark.parametrize("case", CASES)
def test_rehearsed_peaks_of_every_step_equal_those_on_the_card(cuda: str, case: str) -> None:
    script = ("-m", "tests.gpu.one_card", case)
    real = peaks(sys.executable, *script)
    memory = f"{torch.cuda.get_device_properties(0).total_memory // 2**20}MiB"
    tune_adaptive = str(Path(sys.executable).with_name("tune-adaptive"))
    rehearsed = peaks(tune_adaptive, "rehearse", "--memory", memory, "--", *script)
    assert len(real) == len(LENGTHS)
    assert rehearsed == real


@pytest.mark.real_gpu
def test_comparison_with_the_card_has_equal_peaks_and_measured_times(cuda: str) -> None:
    tune_adaptive = [str(Path(sys.executable).with_name("tune-adaptive")), "rehearse"]
    ended = subprocess.run(
        [*tune_adaptive, "--compare", "--format", "json", "--", "-m", "tests.gpu.one_card", "plain"],
        cwd=ROOT, stdout=subprocess.PIPE, timeout=200,
    )  # fmt: skip
    found = json.loads(ended.stdout)
    assert len(found["differences"]) == len(LENGTHS)
    for step in found["differences"]:
        assert (step["allocated_bytes"]["difference"], step["reserved_bytes"]["difference"]) == (0, 0)
    assert all(step["seconds"] for step in found["real"]["steps"][1:])
