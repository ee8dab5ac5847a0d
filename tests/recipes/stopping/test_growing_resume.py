"""A run whose batch grows, stopped between two increases and right before one, is the run that was never stopped."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from tests.ranks import free_ports, run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import RELATIVE_AFTER_ADAM, demo_config, run_ours
from tests.recipes.stops import stopped_before, to_resume

EPOCHS = 6
GROWING = (
    f"epochs={EPOCHS}",
    "dataset.samples=48",
    "batch_size=1",
    "gradient_accumulation_steps=2",
    "tokenizer.max_seq_len=256",
    "adaptive.max_batch_size=8",
    "adaptive.lr_scaling=sqrt",
    "clip_grad_norm=inf",
    "batch_increase_function=tests.recipes.stopping.test_growing_resume.grow_at_2_and_4",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=4",
    "optimizer.lr=0.001",
)
BATCH_SIZES = [1, 1, 2, 2, 4, 4]
STOPS = (3, 4)
"""The epochs before which the run ends."""


def grow_at_2_and_4(epoch: int, current_batch_size: int) -> int:
    return current_batch_size if epoch in (2, 4) else 0


def run_all(folder: Path, ports: list[int]) -> None:
    """Collective: a run that never stops, and one that is ended and resumed twice."""
    os.environ["MASTER_PORT"] = str(ports.pop())
    run_ours("full", demo_config("full", folder / "whole", *GROWING))
    for epoch, end in pairwise((0, *STOPS, EPOCHS)):
        os.environ["MASTER_PORT"] = str(ports.pop())
        resume = to_resume("full", epoch) if epoch else []
        with stopped_before(end) if end < EPOCHS else nullcontext():
            run_ours("full", demo_config("full", folder / "stopped", *GROWING, *resume))


def test_losses_sizes_and_rates_are_those_of_the_run_that_never_stopped(tmp_path: Path) -> None:
    run_on_ranks(2, run_all, tmp_path, free_ports(2 + len(STOPS)), timeout_s=120, in_group=False)
    whole, stopped = read_log(tmp_path / "whole" / "log.jsonl"), read_log(tmp_path / "stopped" / "log.jsonl")
    steps = [24 // (2 * size) for size in BATCH_SIZES]
    assert [step["microbatch_rows"] for step in whole] == [
        size for size, count in zip(BATCH_SIZES, steps, strict=True) for _ in range(count)
    ]
    for one, other in zip(stopped, whole, strict=True):
        for figure in ("step", "loss", "grad_norm", "lr", "microbatch_rows"):
            assert one[figure] == pytest.approx(other[figure], rel=RELATIVE_AFTER_ADAM, abs=1e-12), figure
