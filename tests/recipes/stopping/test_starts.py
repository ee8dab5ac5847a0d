"""What the start of a run checks: another run in its folder, a disk that ranks do not share, and generated weights."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.running import run_as_command
from tests.unit.checkpoints.test_resuming import config
from tests.unit.lifecycle.test_run_state import another_run
from torchtune_adaptive.checkpoints.resuming import find_start
from torchtune_adaptive.cli.status import Condition, condition_of
from torchtune_adaptive.config.checks import read_full_settings
from torchtune_adaptive.errors import ConfigError

RUN = ("dataset.samples=16", "tokenizer.max_seq_len=64")


@pytest.mark.smoke
def test_second_run_in_a_folder_names_the_first_and_changes_no_file(tmp_path: Path) -> None:
    out = tmp_path / "run" / "out"
    out.mkdir(parents=True)
    with another_run(out) as first:
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        ended = run_as_command(2, "full", tmp_path / "run", *RUN)
        assert [each.status for each in ended] == [1, 1]
        [error] = [line for line in ended[0].output.splitlines() if line.startswith("error")]
        assert str(out) in error
        assert f"process {first.pid} " in error
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    ended = run_as_command(2, "full", tmp_path / "run", *RUN)
    assert [each.status for each in ended] == [0, 0]
    assert condition_of(out)[0] is Condition.FINISHED


def test_run_resumes_with_the_frozen_weights_generated_by_its_first_start(tmp_path: Path) -> None:
    assert not (tmp_path / "weights").exists()
    for epochs in (1, 2):
        overrides = (*RUN, "resume_from_checkpoint=auto", f"epochs={epochs}")
        [ended] = run_as_command(1, "lora", tmp_path / "run", *overrides)
        assert ended.status == 0, ended.output
    assert (tmp_path / "run" / "out" / "epoch_1").is_dir()


def start_on_a_separate_disk(folder: Path) -> str:
    own = folder / f"disk_{dist.get_rank()}"
    (own / ".saving").mkdir(parents=True)  # left by an earlier run
    with pytest.raises(ConfigError) as error:
        find_start(read_full_settings(config(own)), "full")
    return str(error.value)


def test_unshared_disk_is_detected_even_after_an_earlier_run(tmp_path: Path) -> None:
    for message in run_on_ranks(2, start_on_a_separate_disk, tmp_path):
        assert "rank 1" in message
