import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from tests.null.processes import skip_without_null_device


class Answer(NamedTuple):
    found: Any
    """The result."""
    printed: str
    """The output of the script."""


Rehearse = Callable[..., Answer]


@pytest.fixture
def rehearse(tmp_path: Path) -> Rehearse:
    """Return `rehearse(*words)`, which runs the command beside a script, train.py, and checks its status."""
    skip_without_null_device()

    def run(*words: str, script: str = "", status: int = 0) -> Answer:
        (tmp_path / "train.py").write_text(dedent(script))
        program = [Path(sys.executable).with_name("rehearse"), "--format", "json", *words]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
        assert ended.returncode == status, ended.stderr
        return Answer(json.loads(ended.stdout), ended.stderr)

    return run
