"""What a version before checkpoints had manifests has written is read: its record, and its checkpoint gone on from.

`written_before/` is the output of the demo with a tiny model on one process, as the code was before the rooms.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import demo_config, run_ours
from torchtune_adaptive.record.timeline import read_timeline

WRITTEN = Path(__file__).parent / "written_before"
TINY = {"embed_dim": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_dim": 8}
RUN = (
    *(f"model.{name}={size}" for name, size in TINY.items()),
    *(f"checkpointer.sizes.{name}={size}" for name, size in TINY.items()),
    *("dataset.samples=32", "batch_size=4", "gradient_accumulation_steps=1", "epochs=2", "clip_grad_norm=1.0"),
)
RESUME = (
    *("overwrite_output_dir=False", "resume_from_checkpoint=True"),
    "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]",
)
STEPS_PER_EPOCH = 8


def test_its_record_is_read() -> None:
    timeline = read_timeline(WRITTEN)
    assert [record["step"] for record in timeline.steps] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert [event["kind"] for event in timeline.events] == ["start"]


def resume(folder: Path) -> None:
    run_ours("full", demo_config("full", folder, *RUN, *RESUME))


def test_its_checkpoint_is_gone_on_from_as_it_went_on_itself(tmp_path: Path) -> None:
    then = [record["loss"] for record in read_timeline(WRITTEN).steps[STEPS_PER_EPOCH:]]
    shutil.copytree(WRITTEN, tmp_path / "run" / "out")
    run_on_ranks(1, resume, tmp_path / "run", timeout_s=60, in_group=False)
    now = read_log(tmp_path / "run" / "log.jsonl")
    assert [step["step"] for step in now] == list(range(STEPS_PER_EPOCH + 1, 2 * STEPS_PER_EPOCH + 1))
    assert [step["loss"] for step in now] == pytest.approx(then, rel=1e-3)
    assert (tmp_path / "run" / "out" / "epoch_1" / "adaptive_checkpoint.json").is_file()
    state = tmp_path / "run" / "out" / "recipe_state" / "recipe_state.pt"
    assert state.resolve().parent.name == "epoch_1"
