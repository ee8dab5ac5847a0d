"""Measure how long a checkpoint pauses training, with our recipes and stock's.

Goal: no longer than stock's pause. Both recipes have the same model and optimizer on the same ranks and save
alternately. A copy of the state to host memory is measured as well. CPU seconds are those of rank 0's training thread.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torchtune.training.checkpointing._checkpoint_client import TrainingProgress

from benchmarks.results import Result, compared
from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours, load_stock, stock_on_cpu

SIZES = ("embed_dim=512", "num_layers=8", "num_heads=8", "intermediate_dim=1536")
MODEL = (*(f"model.{size}" for size in SIZES), *(f"checkpointer.sizes.{size}" for size in SIZES), "epochs=1000")
RANKS = 2


@dataclass(frozen=True)
class Case:
    name: str
    recipe: str
    options: tuple[str, ...] = ()


CASES = [
    Case("full", "full"),
    Case("LoRA", "lora"),
    Case("LoRA, adapter only", "lora", ("save_adapter_weights_only=True",)),
]


class Pause(NamedTuple):
    wall_s: float
    cpu_s: float


class Pauses(NamedTuple):
    """Pauses of one round."""

    stock: Pause
    ours: Pause
    copy: Pause


def run(pairs: int) -> Result:
    note = (
        f"{RANKS} ranks. ratio: wall time of ours over stock's, of neighbouring saves; cpu ratio: of rank 0's training "
        "thread. copy: the trained state of a rank, copied to other host memory. Ours syncs to disk, reads back for "
        "checksums and keeps random generators; stock's does not"
    )
    return Result([measure(case, pairs) for case in CASES], note)


def measure(case: Case, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        timeout_s = 120 + 30 * pairs
        rounds, saved_bytes = run_on_ranks(
            RANKS, save_in_turns, case, Path(folder), pairs, timeout_s=timeout_s, in_group=False
        )[0]

    def middle(of: Callable[[Pauses], float]) -> float:
        return statistics.median(map(of, rounds))

    return {
        "checkpoint": case.name,
        "MiB": saved_bytes / 2**20,
        "stock s": middle(lambda each: each.stock.wall_s),
        "ours s": middle(lambda each: each.ours.wall_s),
        "copy s": middle(lambda each: each.copy.wall_s),
        "stock cpu s": middle(lambda each: each.stock.cpu_s),
        "ours cpu s": middle(lambda each: each.ours.cpu_s),
        "cpu ratio": compared([(each.stock.cpu_s, each.ours.cpu_s) for each in rounds])["ratio"],
        **compared([(each.stock.wall_s, each.ours.wall_s) for each in rounds]),
    }


def save_in_turns(case: Case, folder: Path, pairs: int, model: Sequence[str] = MODEL) -> tuple[list[Pauses], int]:
    """Collective: return the pauses of each round except the first, and the bytes of one adaptive checkpoint."""
    ours = load_ours(case.recipe)(demo_config(case.recipe, folder / "ours", *model, *case.options))
    ours.setup()
    have_optimizer_state(ours.model, ours.optimization.checkpointed)
    with stock_on_cpu(), mock.patch("torch.distributed.init_process_group"):
        config = demo_config(case.recipe, folder / "stock", *model, *case.options)
        stock = load_stock(case.recipe)(config)
        stock.setup(config)
        have_optimizer_state(stock._model, stock._optimizer)
        rounds = []
        group = dist.new_group()
        for epoch in range(pairs + 1):
            by_stock = timed(lambda at=epoch: save_as_stock(case.recipe, stock, at), group)  # type: ignore[misc]
            by_us = timed(lambda at=epoch: save_as_ours(ours, at), group)  # type: ignore[misc]
            rounds.append(Pauses(by_stock, by_us, timed(lambda: _copied(ours), group)))
            _remove_older(folder)
    newest = ours.run.checkpoints.last
    saved_bytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    ours.cleanup()
    return rounds[1:], saved_bytes


def timed(save: Callable[[], object], group: dist.ProcessGroup) -> Pause:
    """Collective: return the seconds until training continues on all ranks."""
    dist.barrier(group)
    began, cpu_began = time.perf_counter(), time.thread_time()
    save()
    dist.barrier(group)
    return Pause(time.perf_counter() - began, time.thread_time() - cpu_began)


def have_optimizer_state(model: Any, optimizer: Any) -> None:
    """Create the optimizer state by a step with zero gradients."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def save_as_ours(ours: Any, epoch: int) -> None:
    ours.run.progress = ours.run.progress.after_epoch(replace(ours.loop.schedule.epochs[0], epoch=epoch))
    ours.loop.save()


def save_as_stock(recipe: str, stock: Any, epoch: int) -> None:
    if recipe == "lora":
        stock.save_checkpoint(epoch=epoch)
        return
    progress = TrainingProgress(
        seed=0,
        epochs_run=epoch,
        total_epochs=1000,
        max_steps_per_epoch=None,  # type: ignore[arg-type]
        dataloader_state_dict=stock._dataloader.state_dict(),
    )
    stock._checkpoint_client.save_checkpoint(
        model=stock._model, optimizer=stock._optimizer, training_progress=progress, epoch=epoch
    )


def _copied(ours: Any) -> object:
    """Copy the trained state of this rank."""
    trained = {name: each for name, each in ours.model.named_parameters() if each.requires_grad}
    state = {"model": trained, "optimizer": ours.optimization.checkpointed.state_dict()}

    def copied(value: Any) -> Any:
        local = value.to_local() if isinstance(value, DTensor) else value
        return local.detach().to("cpu", copy=True) if isinstance(local, torch.Tensor) else local

    return tree_map(copied, state)


def _remove_older(folder: Path) -> None:
    """Remove all checkpoints except the newest of each side, to save disk space."""
    dist.barrier()
    if dist.get_rank() == 0:
        for out in (folder / "ours" / "out", folder / "stock" / "out"):
            for path in sorted(out.glob("*epoch_*"), key=lambda each: each.stat().st_mtime)[:-1]:
                shutil.rmtree(path)
    dist.barrier()
