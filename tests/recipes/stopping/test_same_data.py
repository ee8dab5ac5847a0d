"""All ranks, and a resumed run, need the same data."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours, start_in_process
from torchtune_adaptive.demo import dataset
from torchtune_adaptive.demo.dataset import demo_row
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune import distributed

ANOTHER_FILE = "sample 0 of the dataset on rank 1 differs from that on rank 0"


def other_rows() -> Any:
    return mock.patch.object(dataset, "demo_row", lambda seed, index: demo_row(seed, index + 1))


def set_up(kind: str, folder: Path) -> str:
    """Collective."""
    differs: AbstractContextManager[Any] = other_rows() if os.environ["RANK"] == "1" else nullcontext()
    with differs, pytest.raises(ConfigError) as error:
        load_ours(kind)(demo_config(kind, folder)).setup()
    distributed.leave()
    return str(error.value)


@pytest.mark.parametrize("kind", ["full", "full_dpo"])
def test_difference_on_one_rank_is_the_same_error_on_all_ranks(kind: str, tmp_path: Path) -> None:
    first, second = run_on_ranks(2, set_up, kind, tmp_path / "run", timeout_s=60, in_group=False)
    assert first == second
    assert first.startswith(ANOTHER_FILE), first


def test_resume_refuses_data_that_changed_under_the_same_config(tmp_path: Path) -> None:
    run = ["--config", "adaptive/demo/full", f"output_dir={tmp_path}", "dataset.samples=16", "adaptive=null"]
    run += ["use_maximum_batch_size=False", "resume_from_checkpoint=auto"]
    run += [f"checkpointer.checkpoint_dir={tmp_path / 'weights'}"]
    start_in_process("full", *run, "epochs=1", train=True)
    start_in_process("full", *run, "epochs=2")
    with other_rows(), pytest.raises(ConfigError, match="cannot resume: sample 0 of the dataset has changed since"):
        start_in_process("full", *run, "epochs=2")
