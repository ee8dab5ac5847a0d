"""A checkpoint being written does not prevent recovery, and recovery does not damage the checkpoint."""

import threading
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.ranks import PATIENCE, run_on_ranks
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.checkpoints.store import find_checkpoints, newest_intact
from torchtune_adaptive.testing import FaultInjector

RUN = (
    "dataset.samples=32",
    "tokenizer.max_seq_len=64",
    "enable_async_checkpointing=True",
    "save_every_n_steps=1",
    "resume_from_checkpoint=auto",
    "overwrite_output_dir=False",
)


def run_out_of_memory_while_saving(folder: Path) -> dict[str, Any]:
    """Collective: delay writing the checkpoint of step 1 until step 2 has recovered."""
    recipe = load_ours("full")(demo_config("full", folder, *RUN))
    recipe.setup()
    begun, recovered, was_writing, run = threading.Event(), threading.Event(), [], recipe.runner.run
    write = FileSystemWriter.write_data

    def slow_write(writer: Any, *args: Any, **options: Any) -> Any:
        begun.set()
        assert recovered.wait(60 * PATIENCE)
        return write(writer, *args, **options)

    def run_and_tell(samples: Any, *, step: int, **options: Any) -> Any:
        result = run(samples, step=step, **options)
        if step == 2:
            was_writing.append(begun.wait(60 * PATIENCE))
            recovered.set()
        return result

    recipe.runner.run = run_and_tell
    faults = FaultInjector(recipe.runner).fail_at(rank=1, step=2, operation=200)
    with faults, mock.patch.object(FileSystemWriter, "write_data", slow_write):
        recipe.train()
        recoveries = recipe.runner.recoveries
        recipe.cleanup()
    return {"recoveries": recoveries, "was_writing": was_writing}


def test_step_recovers_while_a_checkpoint_is_written_and_both_are_intact(tmp_path: Path) -> None:
    message = run_on_ranks(2, run_out_of_memory_while_saving, tmp_path / "run", timeout_s=60, in_group=False)
    assert [each["recoveries"] for each in message] == [1, 1]
    assert [each["was_writing"] for each in message] == [[True], [True]]
    found = find_checkpoints(tmp_path / "run" / "out")
    assert {each.name for each in found if each.manifest} == {"step_1", "epoch_0"}
    for each in found:
        assert newest_intact([each])[1] == []
