import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from tests.processes import skip_without_null_device


class Answer(NamedTuple):
    status: int
    found: Any
    """The result as JSON or as text."""
    printed: str
    """The output of the script."""


Rehearse = Callable[..., Answer]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` runs: all unit tests, and of tests marked with cases only these."""
    for item in items:
        marker = item.get_closest_marker("smoke")
        if "unit" in item.path.parts:
            item.add_marker("smoke")
        elif isinstance(item, pytest.Function) and marker and marker.args and item.callspec.id not in marker.args:
            item.own_markers.remove(marker)


def run_program(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this environment in a folder; skip the test if null devices are unavailable."""
    skip_without_null_device()
    program = str(Path(sys.executable).with_name(words[0]))
    return subprocess.run(
        [program, *words[1:]], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip


@pytest.fixture
def rehearse(tmp_path: Path) -> Rehearse:
    """Return `rehearse(script, *options, command=[...])`, which saves the script as train.py, rehearses it and, with
    `status=...`, checks the status."""
    skip_without_null_device()  # before a test replaces subprocess.run, which builds the library

    def run(
        script: str, *options: str, command: tuple[str, ...] = ("train.py",), json_format: bool = True,
        variables: Mapping[str, str] | None = None, status: int | None = None,
    ) -> Answer:  # fmt: skip
        (tmp_path / "train.py").write_text(dedent(script))
        as_json = ("--format", "json") if json_format else ()
        words = ("rehearse", *options, *as_json, "--", *command)
        answer = run_program(tmp_path, *words, **(variables or {}))
        assert status is None or answer.returncode == status, answer.stderr
        found = json.loads(answer.stdout) if json_format and answer.stdout else answer.stdout
        # on a slow machine, lines of progress come between those of the script
        return Answer(answer.returncode, found, re.sub(r"(?m)^rehearse: .*\b\d+ s\n", "", answer.stderr))

    return run
