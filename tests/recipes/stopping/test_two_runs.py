"""Two runs in one output_dir: the second ends before it changes any file."""

import re
from pathlib import Path

import pytest

from tests.recipes.signal_runs import run_with_signals
from tests.unit.lifecycle.test_run_state import another_run
from torchtune_adaptive.cli.status import Condition, condition_of

RUN = ("dataset.samples=16", "tokenizer.max_seq_len=64")


@pytest.mark.smoke
def test_second_run_names_the_first_and_changes_no_file(tmp_path: Path) -> None:
    out = tmp_path / "run" / "out"
    out.mkdir(parents=True)
    with another_run(out) as first:
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        ended = run_with_signals(2, "full", tmp_path / "run", *RUN)
        assert [each.status for each in ended] == [1, 1]
        assert re.search(
            rf"error: output_dir '{re.escape(str(out))}' is in use by process {first.pid} on", ended[0].lines
        )
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    ended = run_with_signals(2, "full", tmp_path / "run", *RUN)
    assert [each.status for each in ended] == [0, 0]
    assert condition_of(out)[0] is Condition.FINISHED
