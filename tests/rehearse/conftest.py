import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from tests.null.processes import skip_without_null_device


class Answer(NamedTuple):
    status: int
    found: Any
    """The result as JSON or as text."""
    printed: str
    """The output of the script."""


Rehearse = Callable[..., Answer]


@pytest.fixture
def rehearse(tmp_path: Path) -> Rehearse:
    """Return `rehearse(script, *options, command=[...])`, which saves the script as train.py and rehearses it."""
    skip_without_null_device()

    def run(
        script: str, *options: str, command: tuple[str, ...] = ("train.py",), json_format: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> Answer:  # fmt: skip
        (tmp_path / "train.py").write_text(dedent(script))
        answer = subprocess.run(
            [str(Path(sys.executable).with_name("tune-adaptive")), "rehearse", *options]
            + (["--format", "json"] if json_format else [])
            + ["--", *command],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
        )  # fmt: skip
        found = json.loads(answer.stdout) if json_format and answer.stdout else answer.stdout
        return Answer(answer.returncode, found, answer.stderr)

    return run
