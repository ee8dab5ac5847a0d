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
    rehearse = str(Path(sys.executable).with_name("rehearse"))
    rehearsed = peaks(rehearse, "--memory", memory, "--", *script)
    assert len(real) == len(LENGTHS)
    assert rehearsed == real
