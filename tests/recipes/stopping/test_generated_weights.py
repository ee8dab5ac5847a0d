"""Weights that the demo's checkpointer generates at first use belong to the run from its start."""

from pathlib import Path

from tests.recipes.signal_runs import run_with_signals

RUN = ("dataset.samples=16", "tokenizer.max_seq_len=64", "resume_from_checkpoint=auto")


def test_run_resumes_with_the_frozen_weights_generated_by_its_first_start(tmp_path: Path) -> None:
    assert not (tmp_path / "weights").exists()
    for epochs in (1, 2):
        [ended] = run_with_signals(1, "lora", tmp_path / "run", *RUN, f"epochs={epochs}")
        assert ended.status == 0, ended.lines
    assert (tmp_path / "run" / "out" / "epoch_1").is_dir()
