"""All ranks, and a resumed run, need the same data and the same frozen weights."""

import os
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torchtune.training import FullModelTorchTuneCheckpointer

from tests.ranks import run_on_ranks
from tests.recipes.preferences.test_compile_and_quantization import QUANTIZED
from tests.recipes.running import demo_config, load_ours, start_in_process
from torchtune_adaptive.demo import dataset
from torchtune_adaptive.demo.dataset import demo_row
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune import distributed

ANOTHER_FILE = "sample 0 of the dataset on rank 1 differs from that on rank 0"
WEIGHT = "layers.0.attn.q_proj.weight"
CASES = {
    "full": ((), ANOTHER_FILE),
    "full_dpo": ((), ANOTHER_FILE),
    "lora": (QUANTIZED, f"checkpointer: weight {re.escape(WEIGHT)} on rank 1 differs from that on rank 0"),
}


def other_rows() -> Any:
    return mock.patch.object(dataset, "demo_row", lambda seed, index: demo_row(seed, index + 1))


def other_weights() -> Any:
    read = FullModelTorchTuneCheckpointer.load_checkpoint

    def changed(checkpointer: Any) -> Any:
        state = read(checkpointer)
        state["model"][WEIGHT] = state["model"][WEIGHT] + 1
        return state

    return mock.patch.object(FullModelTorchTuneCheckpointer, "load_checkpoint", changed)


def set_up(kind: str, folder: Path) -> str:
    """Collective."""
    differs: AbstractContextManager[Any] = nullcontext()
    if os.environ["RANK"] == "1":
        differs = other_weights() if kind == "lora" else other_rows()
    with differs, pytest.raises(ConfigError) as error:
        load_ours(kind)(demo_config(kind, folder, *CASES[kind][0])).setup()
    distributed.leave()
    return str(error.value)


@pytest.mark.parametrize("kind", CASES)
def test_difference_on_one_rank_is_the_same_error_on_all_ranks(kind: str, tmp_path: Path) -> None:
    first, second = run_on_ranks(2, set_up, kind, tmp_path / "run", timeout_s=60, in_group=False)
    assert first == second
    assert re.match(CASES[kind][1], first), first


def test_resume_refuses_data_that_changed_under_the_same_config(tmp_path: Path) -> None:
    run = ["--config", "adaptive/demo/full", f"output_dir={tmp_path}", "dataset.samples=16", "adaptive=null"]
    run += ["use_maximum_batch_size=False", "resume_from_checkpoint=auto"]
    run += [f"checkpointer.checkpoint_dir={tmp_path / 'weights'}"]
    start_in_process("full", *run, "epochs=1", train=True)
    start_in_process("full", *run, "epochs=2")
    with other_rows(), pytest.raises(ConfigError, match="cannot resume: sample 0 of the dataset has changed since"):
        start_in_process("full", *run, "epochs=2")
