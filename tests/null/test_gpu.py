"""The tests of tests/gpu that need neither results nor time, on a null device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_rehearsal.device import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_gpu_tests_not_marked_real_gpu_pass() -> None:
    on_null = [sys.executable, "-m", "pytest"]
    ended = subprocess.run(
        [*on_null, "tests/gpu", "-q", "-p", "no:cacheprovider", "-m", "not nightly and not real_gpu"],
        cwd=ROOT,
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    assert int(ended.stdout.rpartition(" passed")[0].split()[-1]) >= 11  # and tests are not skipped for lack of a card
