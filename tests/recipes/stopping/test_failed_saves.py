"""A failed save ends the run with one message on every rank."""

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.checkpoints import manager, rank_0, store
from torchtune_adaptive.errors import AdaptiveError, CheckpointError, CollectiveFailedError, UnrecoverableError
from torchtune_adaptive.lifecycle import distributed

RUN = ("resume_from_checkpoint=auto", "epochs=2", "save_every_n_steps=2")
LOST = "[/src/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer. GLHF!"


@contextmanager
def folder_removed(recipe: Any) -> Iterator[None]:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(recipe.run.settings.output_dir) / store.SAVING)
    dist.barrier()
    yield


def raising(function: str, error: Exception) -> Callable[[Any], Any]:
    return lambda _: mock.patch(f"torchtune_adaptive.checkpoints.{function}", side_effect=error)


@contextmanager
def stale_mount(_: Any) -> Iterator[None]:
    """Rank 1 learns of the failure when rank 0 has removed its files already."""
    error, run = OSError(errno.ESTALE, "Stale file handle"), rank_0.run

    def late(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        time.sleep(2 * dist.get_rank())
        return found

    with (
        mock.patch.object(rank_0, "run", late),
        mock.patch.object(manager.CheckpointManager, "_write", side_effect=error),
        mock.patch.object(shutil, "disk_usage", side_effect=error),
    ):
        yield


@contextmanager
def weight_of_rank_1_is_nan(recipe: Any) -> Iterator[None]:
    if dist.get_rank() == 1:
        next(recipe.model.parameters()).to_local().data.fill_(float("nan"))
    yield


def slow_disk(patience_s: float) -> Callable[[Any], Any]:
    """Let rank 0 write for twice as long as the timeout of the process group."""

    @contextmanager
    def slow(_: Any) -> Iterator[None]:
        write, timeout_s, group = manager.CheckpointManager._write, 4, dist.group.WORLD

        def write_slowly(*args: Any) -> None:
            time.sleep(2 * timeout_s)
            write(*args)

        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
        with (
            mock.patch.object(manager.CheckpointManager, "_write", write_slowly),
            mock.patch.multiple(rank_0, MESSAGE_EVERY_S=0.5, PATIENCE_S=patience_s),
        ):
            yield
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=5), group)

    return slow


class Case(NamedTuple):
    spoil: Callable[[Any], Any]
    """Return the context of the third save."""
    error: type[AdaptiveError] | None
    names: tuple[str, ...] = ()
    """Parts of the message."""
    kind: str = "full"


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
CASES = {
    "folder is gone": Case(folder_removed, CheckpointError, ("step_6", "{out}", "resume_from_checkpoint=auto")),
    "stale mount": Case(stale_mount, CheckpointError, ("step_6", "Stale file handle")),
    "no memory": Case(raising("manager.gather_weights", NO_MEMORY), UnrecoverableError, ("step_6", "rank {rank}")),
    "no memory on rank 0": Case(
        raising("contents.peft.get_merged_lora_ckpt", NO_MEMORY), CheckpointError, ("step_6", "rank 0"), "lora"
    ),
    "nan": Case(weight_of_rank_1_is_nan, CheckpointError),
    "lost peer": Case(raising("manager.gather_weights", RuntimeError(LOST)), CollectiveFailedError, ("step_6",)),
    "no progress": Case(slow_disk(patience_s=1.0), CheckpointError, ("step_6", "rank 0")),
    "slow": Case(slow_disk(patience_s=rank_0.PATIENCE_S), None),
}


def trained(case: str, folder: Path) -> tuple[str, str, list[str], bool]:
    """Collective: return the type and message of the error of a run, its complete checkpoints, and whether this rank
    may record its end."""
    recipe = load_ours(CASES[case].kind)(demo_config(CASES[case].kind, folder, *RUN))
    recipe.setup()
    save, saves, error = recipe.run.checkpoints.save, [0], None

    def save_or_fail(*args: Any) -> None:
        saves[0] += 1
        if saves[0] != 3:
            return save(*args)
        with CASES[case].spoil(recipe):
            return save(*args)

    recipe.run.checkpoints.save = save_or_fail
    try:
        recipe.train()
        recipe.cleanup()
    except AdaptiveError as raised:
        error = raised
        distributed.leave()
    found = store.find_checkpoints(folder / "out")
    complete = sorted(each.path.name for each in found if each.manifest)
    return type(error).__name__, str(error), complete, manager.THIS_RUN.record_directory is not None


@pytest.mark.smoke("folder is gone", "stale mount")
@pytest.mark.parametrize("case", CASES)
def test_every_rank_ends_with_the_error_and_keeps_the_last_good_checkpoints(tmp_path: Path, case: str) -> None:
    """A save may take longer than a collective while rank 0 makes progress."""
    ended = run_on_ranks(2, trained, case, tmp_path / "run", timeout_s=90, in_group=False)
    error, names = CASES[case].error, CASES[case].names
    for rank, (raised, message, complete, records) in enumerate(ended):
        if error is None:
            assert (raised, "step_6" in complete) == ("NoneType", True)
            continue
        assert (raised, records) == (error.__name__, case != "folder is gone"), message
        words = [name.format(out=tmp_path / "run" / "out", rank=rank) for name in names]
        assert [word for word in words if word not in message] == [], message
        assert {"epoch_0", "step_2"} <= {*complete}
        assert case in ("lost peer", "no progress") or ("epoch_0" in message and len(complete) == 2), message


def saved(kind: str, overrides: tuple[str, ...], folder: Path) -> tuple[list[str], float]:
    """Collective: train on a full disk. Return this rank's warnings, and the bytes of the checkpoint relative to the
    estimate."""
    recipe = load_ours(kind)(demo_config(kind, folder, "max_steps_per_epoch=2", "epochs=1", *overrides))
    recipe.setup()
    usage = mock.patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=1))
    with usage, mock.patch.object(manager.logger, "warning") as warning:
        recipe.train()
    recipe.cleanup()
    written = sum(file.stat().st_size for file in (folder / "out" / "epoch_0").iterdir())
    estimate = recipe.run.contents.size(recipe.model, recipe.optimization.optimizers)
    return [call.args[0] % call.args[1:] for call in warning.call_args_list], written / estimate


@pytest.mark.smoke("adapters")
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("full", ()), ("lora", ()), ("lora", ("save_adapter_weights_only=True",))],
    ids=["full", "lora", "adapters"],
)
def test_a_disk_without_room_for_a_checkpoint_is_logged(tmp_path: Path, kind: str, overrides: tuple[str, ...]) -> None:
    run = run_on_ranks(2, saved, kind, overrides, tmp_path / "run", timeout_s=90, in_group=False)
    ((line,), ratio), (warnings_of_rank_1, _) = run
    assert (str(tmp_path / "run" / "out") in line, warnings_of_rank_1) == (True, [])
    assert 0.95 < ratio < 1.2
