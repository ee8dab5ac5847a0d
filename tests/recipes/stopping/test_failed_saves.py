"""A failed save ends the run with one message on every rank."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.checkpoints import manager, store, waiting
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.tune import distributed

RUN = ("resume_from_checkpoint=auto", "epochs=2", "save_every_n_steps=2")
IS_GONE = ("step_6", "{out}", "is missing", "resume_from_checkpoint=auto")
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


@contextmanager
def slow_disk(recipe: Any, out: Path, *, patience_s: float = waiting.PATIENCE_S) -> Iterator[None]:
    """Collective: let rank 0 write for twice as long as the timeout of the process group."""
    write, timeout_s, group = manager.CheckpointManager._write, 4, dist.group.WORLD

    def write_slowly(*args: Any) -> None:
        time.sleep(2 * timeout_s)
        write(*args)

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    with (
        mock.patch.object(manager.CheckpointManager, "_write", write_slowly),
        mock.patch.multiple(waiting, MESSAGE_EVERY_S=0.5, PATIENCE_S=patience_s),
    ):
        yield
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=5), group)


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
SLOW = {
    "slow": Case(slow_disk, ()),
    "stuck": Case(partial(slow_disk, patience_s=1.0), ("step_6 could not be saved", "rank 0 has made no progress for")),
}


def trained(name: str, folder: Path) -> tuple[str | None, list[str]]:
    """Collective: return the error of a run whose third checkpoint failed, and its complete checkpoints."""
    case = {**CASES, **SLOW}[name]
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
        assert good in message
        assert complete == [good, "step_2"], "complete checkpoints are kept"


@pytest.mark.parametrize("name", SLOW)
def test_a_save_may_take_longer_than_a_collective_while_rank_0_makes_progress(tmp_path: Path, name: str) -> None:
    messages, complete = zip(
        *run_on_ranks(2, trained, name, tmp_path / "run", timeout_s=90, in_group=False), strict=True
    )
    assert messages[0] == messages[1]
    assert (messages[0] is None) == (name == "slow")
    assert all(text in (messages[0] or "") for text in SLOW[name].text)
    assert name == "stuck" or "step_6" in complete[0]


LOST = "[/src/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer. GLHF!"


def gathering_with_a_lost_peer(folder: Path) -> str:
    """Collective: return the error of a run in which gloo reports a lost peer while a checkpoint is gathered."""
    recipe = load_ours("full")(demo_config("full", folder, *RUN))
    recipe.setup()
    with mock.patch.object(manager, "gather_weights", side_effect=RuntimeError(LOST)):
        try:
            recipe.train()
        except AdaptiveError as error:
            distributed.leave()
            return str(error)
    raise AssertionError("the save has not failed")


def test_lost_peer_is_explained_also_while_a_checkpoint_is_gathered(tmp_path: Path) -> None:
    [message] = run_on_ranks(1, gathering_with_a_lost_peer, tmp_path / "run", timeout_s=90, in_group=False)
    assert message.startswith(
        "another rank has exited or the network has failed (gathering checkpoint step_2 failed on"
    )
