"""Two runs in one output_dir: the second ends before it has touched anything."""

import re
from pathlib import Path

import pytest

from tests.recipes.signalled import live_on_ranks
from tests.unit.life.test_output_lock import another_run
from torchtune_adaptive.cli.status import Condition, look

RUN = ("dataset.samples=16", "tokenizer.max_seq_len=64")


@pytest.mark.smoke("its-checkpoints")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["its-checkpoints", "its-record"])
def test_the_second_run_says_who_is_there_and_leaves_everything_as_it_is(elsewhere: bool, tmp_path: Path) -> None:
    options = (*RUN, f"checkpointer.output_dir={tmp_path / 'checkpoints'}") if elsewhere else RUN
    out = tmp_path / "run" / "out"
    out.mkdir(parents=True)
    with another_run(out) as first:
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        ended = live_on_ranks(2, "full", tmp_path / "run", *options)
        assert [each.status for each in ended] == [1, 1]
        assert re.search(
            rf"error: output_dir '{re.escape(str(out))}' is in use by process {first.pid} on", ended[0].lines
        )
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    ended = live_on_ranks(2, "full", tmp_path / "run", *options)
    assert [each.status for each in ended] == [0, 0]
    assert look(out)[0] is Condition.FINISHED


def test_an_error_is_the_last_line_and_kept_for_whoever_asks_how_the_run_ended(tmp_path: Path) -> None:
    broken = ("optimizer.lr=1e30", "lr_scheduler=null", "clip_grad_norm=null", "adaptive.max_skipped_steps=0")
    ended = live_on_ranks(2, "full", tmp_path / "run", *RUN, *broken, "epochs=4")
    assert [each.status for each in ended] == [1, 1]
    told = r"error: step [2-4]: the (loss|gradient norm) is (nan|inf), in 1 consecutive step, and .* is 0;"
    assert re.match(told, ended[0].lines.splitlines()[-1])
    condition, (why, *_) = look(tmp_path / "run" / "out")
    assert condition is Condition.BROKEN
    assert "adaptive.max_skipped_steps is 0" in why
