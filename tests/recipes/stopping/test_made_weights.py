"""Weights that the demo's checkpointer makes on first use belong to the run from its beginning."""

from pathlib import Path

from tests.recipes.signalled import live_on_ranks

RUN = ("dataset.samples=16", "tokenizer.max_seq_len=64", "resume_from_checkpoint=auto", "overwrite_output_dir=False")


def test_a_run_whose_frozen_weights_were_made_by_its_first_start_goes_on(tmp_path: Path) -> None:
    assert not (tmp_path / "weights").exists()
    for epochs in (1, 2):
        [ended] = live_on_ranks(1, "lora", tmp_path / "run", *RUN, f"epochs={epochs}")
        assert ended.status == 0, ended.lines
    assert (tmp_path / "run" / "out" / "epoch_1").is_dir()
