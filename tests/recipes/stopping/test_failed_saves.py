"""A failed save ends the run with one message on every rank."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.checkpoints import store
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.tune import distributed

RUN = ("resume_from_checkpoint=auto", "epochs=2", "save_every_n_steps=2")
IS_GONE = ("step_6", "{out}", "no longer belongs to this run", "resume_from_checkpoint=auto")
OUT_OF_MEMORY = ("out of memory while saving checkpoint step_6 on rank {rank}",)


def take_the_folder_away(recipe: Any, out: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(out / store.SAVING)
    dist.barrier()


def no_memory_to(function: str) -> Callable[..., Any]:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    return lambda *_: mock.patch(f"torchtune_adaptive.checkpoints.{function}", full)


def a_weight_of_rank_1_is_nan(recipe: Any, out: Path) -> None:
    if dist.get_rank() == 1:
        next(recipe.model.parameters()).to_local().data.fill_(float("nan"))


class Case(NamedTuple):
    spoil: Callable[..., Any]
    text: tuple[str, ...]
    kind: str = "full"


CASES = {
    "full-gone": Case(take_the_folder_away, IS_GONE),
    "full-no-memory": Case(no_memory_to("manager.gather_weights"), OUT_OF_MEMORY),
    "lora-no-memory-on-rank-0": Case(
        no_memory_to("contents.peft.get_merged_lora_ckpt"), ("step_6 could not be saved", "out of memory"), kind="lora"
    ),
    "full-nan": Case(a_weight_of_rank_1_is_nan, ()),
}


def trained(name: str, folder: Path) -> tuple[str | None, list[str]]:
    """Collective: return the error of a run whose third checkpoint failed, and its complete checkpoints."""
    case = CASES[name]
    recipe = load_ours(case.kind)(demo_config(case.kind, folder, *RUN))
    recipe.setup()
    save, saves = recipe.run.checkpoints.save, [0]

    def save_or_fail(*args: Any) -> None:
        saves[0] += 1
        with (case.spoil(recipe, folder / "out") if saves[0] == 3 else None) or nullcontext():
            save(*args)

    recipe.run.checkpoints.save = save_or_fail
    message = None
    try:
        recipe.train()
        recipe.cleanup()
    except AdaptiveError as error:
        message = str(error)
        distributed.leave()
    found = store.find_checkpoints(folder / "out")
    return message, sorted(each.name for each in found if each.manifest)


@pytest.mark.smoke("full-gone")
@pytest.mark.parametrize("name", CASES)
def test_every_rank_ends_with_path_cause_and_last_good_checkpoint(tmp_path: Path, name: str) -> None:
    ended = run_on_ranks(2, trained, name, tmp_path / "run", timeout_s=90, in_group=False)
    good = "epoch_0"
    for rank, (message, complete) in enumerate(ended):
        assert message is not None
        for word in CASES[name].text:
            assert word.format(out=tmp_path / "run" / "out", rank=rank) in message
        # if another run may have started, a checkpoint of this name may belong to it
        assert (good in message) == (CASES[name].text != IS_GONE)
        assert complete == [good, "step_2"], "complete checkpoints are kept"
