"""Two runs in one output_dir: the second ends before it changes any file, and they never both write into it."""

import json
import re
from pathlib import Path

import pytest

from tests.recipes.signal_runs import run_with_signals
from tests.recipes.terminal import STARTS_S, Started, run_in_terminal
from tests.unit.lifecycle.test_run_state import another_run
from torchtune_adaptive.cli.status import Condition, condition_of
from torchtune_adaptive.report.journal import STEPS_FILE

RUN = ("dataset.samples=16", "tokenizer.max_seq_len=64")
HELD = """
import os, time
from pathlib import Path
from torchtune_adaptive.demo.dataset import demo_dataset

class Held:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        held = Path("hold_" + os.environ["RUN_NAME"])
        while held.exists():
            held.with_suffix(".held").touch()
            time.sleep(0.05)
        return self.samples[index]

def held(tokenizer, **options):
    return Held(demo_dataset(tokenizer, **options))
"""


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


def test_error_is_the_last_line_and_kept_for_status(tmp_path: Path) -> None:
    broken = ("optimizer.lr=1e30", "lr_scheduler=null", "clip_grad_norm=null", "adaptive.max_skipped_steps=0")
    ended = run_with_signals(2, "full", tmp_path / "run", *RUN, *broken, "epochs=4")
    assert [each.status for each in ended] == [1, 1]
    message = r"error: step [2-4]: the (loss|gradient norm) is (nan|inf), in 1 consecutive step, and .* is 0;"
    assert re.match(message, ended[0].lines.splitlines()[-1])
    condition, (why, *_) = condition_of(tmp_path / "run" / "out")
    assert condition is Condition.BROKEN
    assert "adaptive.max_skipped_steps is 0" in why


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a run, except those that it appends to during training."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl"}


def test_run_whose_directory_was_renamed_does_not_write_into_that_of_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    command = ["--nproc_per_node", "2", "adaptive_full_finetune_distributed", "--config", "adaptive/demo/full"]
    command += ["output_dir=out", "dataset._component_=held.held", "dataset.samples=640", "save_every_n_steps=4"]
    command += ["use_maximum_batch_size=False", "adaptive=null", "epochs=1"]
    command += ["metric_logger.log_dir=logs"]

    def stopped_after_step_4(run: Started, name: str) -> None:
        run.when((tmp_path / "out" / "step_4").exists, STARTS_S)
        (tmp_path / f"hold_{name}").touch()
        run.when((tmp_path / f"hold_{name}.held").exists, 60)

    with run_in_terminal(tmp_path, command, forked=True, RUN_NAME="first") as first:
        stopped_after_step_4(first, "first")
        (tmp_path / "out").rename(tmp_path / "moved")
        with run_in_terminal(tmp_path, command, forked=True, RUN_NAME="second") as second:
            stopped_after_step_4(second, "second")
            before = content(tmp_path / "out")
            (tmp_path / "hold_first").unlink()
            first.when(lambda: first.process.poll() is not None, 120)
            assert content(tmp_path / "out") == before
            assert first.process.wait(1) == 1
            (message,) = re.findall(r"^error(?: \(rank 1\))?: .*", first.output, re.MULTILINE)
            assert re.search(r"checkpoint step_\d+ is not saved: .*/out no longer belongs to this run", message)
            assert "last" not in message
            (tmp_path / "hold_second").unlink()
            assert second.process.wait(120) == 0
    assert condition_of(tmp_path / "out")[0] is Condition.FINISHED
    lines = (tmp_path / "out" / STEPS_FILE).read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps))  # no step of the first run
    assert (tmp_path / "moved" / "step_4" / "adaptive_checkpoint.json").is_file()
