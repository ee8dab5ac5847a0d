"""A checkpoint that cannot be written ends a run with one message on every rank."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.checkpoints import saving, store
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.tune import place

RUN = ("overwrite_output_dir=False", "resume_from_checkpoint=auto", "epochs=2", "save_every_n_steps=2")


def trained(kind: str, folder: Path, spoil: str, *overrides: str) -> tuple[str | None, list[str]]:
    """Collective: what ended a run whose third checkpoint failed, and the complete checkpoints."""
    recipe = load_ours(kind)(demo_config(kind, folder, *RUN, *overrides))
    recipe.setup()
    save, saves = recipe.run.checkpoints.save, [0]

    def save_or_fail(*args: Any) -> None:
        saves[0] += 1
        if saves[0] == 3:
            spoiled = SPOILERS[spoil](recipe, folder / "out")
        with (spoiled if saves[0] == 3 else None) or nullcontext():
            save(*args)

    recipe.run.checkpoints.save = save_or_fail
    message = None
    try:
        recipe.train()
        recipe.cleanup()
    except AdaptiveError as error:
        message = str(error)
        place.leave()
    found = store.find_checkpoints(folder / "out")
    return message, sorted(each.name for each in found if each.manifest)


def take_the_folder_away(recipe: Any, out: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(out / store.SAVING)
    dist.barrier()


def take_it_away_between_saves(recipe: Any, out: Path) -> None:
    recipe.run.checkpoints.wait()
    take_the_folder_away(recipe, out)


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def run_out_of_memory(recipe: Any, out: Path) -> Any:
    return mock.patch.object(saving, "gather_weights", full)


def no_memory_to_copy(recipe: Any, out: Path) -> Any:
    return mock.patch.object(saving, "copied_to_host", full)


def no_memory_to_merge(recipe: Any, out: Path) -> Any:
    """Which rank 0 does alone."""
    return mock.patch.object(saving.peft, "get_merged_lora_ckpt", full)


def a_weight_of_rank_1_is_nan(recipe: Any, out: Path) -> None:
    if dist.get_rank() == 1:
        next(recipe.model.parameters()).to_local().data.fill_(float("nan"))


SPOILERS = {
    "nan": a_weight_of_rank_1_is_nan,
    "no memory to copy": no_memory_to_copy,
    "no memory to merge": no_memory_to_merge,
    "gone": take_the_folder_away,
    "gone between": take_it_away_between_saves,
    "memory": run_out_of_memory,
}


@pytest.mark.parametrize(
    ("spoil", "overrides", "good"),
    [("gone", (), "epoch_0"), ("gone between", ("enable_async_checkpointing=True",), "dist_epoch_0")],
    ids=["full-gone", "full-gone-beside-training"],
)
def test_every_rank_ends_with_the_path_the_cause_and_the_last_good_checkpoint(
    tmp_path: Path, spoil: str, overrides: tuple[str, ...], good: str
) -> None:
    ended = run_on_ranks(2, trained, "full", tmp_path / "run", spoil, *overrides, timeout_s=90, in_group=False)
    for message, complete in ended:
        assert message is not None
        out = str(tmp_path / "run" / "out")
        for word in ("step_6", out, "the folder is gone", good, "resume_from_checkpoint=auto"):
            assert word in message
        assert complete == [good, "step_2"], "it is not made anew"


def test_weights_that_are_nan_on_one_rank_push_out_no_checkpoint(tmp_path: Path) -> None:
    for message, complete in run_on_ranks(2, trained, "full", tmp_path / "run", "nan", timeout_s=60, in_group=False):
        assert message is not None
        assert complete == ["epoch_0", "step_2"]


@pytest.mark.parametrize(
    ("kind", "spoil", "overrides", "fact", "good"),
    [
        ("full", "memory", (), "out of memory while saving checkpoint step_6 on rank {rank}", "epoch_0"),
        ("lora", "no memory to merge", (), "step_6 could not be saved", "epoch_0"),
        (
            "full",
            "no memory to copy",
            ("enable_async_checkpointing=True",),
            "out of memory while saving checkpoint step_6 on rank {rank}",
            "dist_epoch_0",
        ),
    ],
)
def test_out_of_memory_in_a_save_names_the_checkpoint_and_the_one_to_go_on_from(
    kind: str, spoil: str, overrides: tuple[str, ...], fact: str, good: str, tmp_path: Path
) -> None:
    ended = run_on_ranks(2, trained, kind, tmp_path / "run", spoil, *overrides, timeout_s=90, in_group=False)
    for rank, (message, complete) in enumerate(ended):
        assert message is not None
        for word in (fact.format(rank=rank), "out of memory", good):
            assert word in message
        assert complete == [good, "step_2"]
