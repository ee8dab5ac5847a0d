"""Losses that add up over microbatches, and losses that do not."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from transformers import Trainer

from tests.hf.trainers import STEPS, arguments, changing_loss, difference, failing_in_forward, train
from torchtune_adaptive.hf import AdaptiveArguments
from torchtune_adaptive.hf.losses import (
    CHECKED_TOKENS,
    FP32_TOLERANCE,
    HALF_TOLERANCE,
    BatchLoss,
    Reduction,
    TwoSamples,
    how_losses_add_up,
)
from torchtune_adaptive.hf.metrics import BatchMetrics
from torchtune_adaptive.hf.samples import Counts

pytestmark = pytest.mark.timeout(300)


def test_loss_check_that_runs_out_of_memory_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock = train(tmp_path, arguments=arguments(tmp_path))
    fails = failing_in_forward(Trainer, 2)
    assert difference(train(tmp_path, AdaptiveArguments(), base=fails, arguments=arguments(tmp_path)), stock) == 0.0
    assert "ran out of memory, so it is skipped" in caplog.text
    again = train(tmp_path, AdaptiveArguments(), base=fails, faults=[(3, 40)], arguments=arguments(tmp_path))
    assert again.column("oom_recoveries")[-1] == 1
    assert difference(again, stock) < 1e-6


def test_loss_check_runs_short_samples_and_only_if_steps_can_be_split(tmp_path: Path) -> None:
    checked: list[tuple[int, ...]] = []

    class Records(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                checked.append(tuple(inputs["input_ids"].shape))
            return super().compute_loss(model, inputs, *args, **kwargs)

    rows = [{"input_ids": [*range(100)] * 2, "labels": [*range(100)] * 2} for _ in range(32)]
    for batch_size, passes in (1, []), (2, [(1, CHECKED_TOKENS), (1, CHECKED_TOKENS), (2, CHECKED_TOKENS)]):
        checked.clear()
        options = arguments(tmp_path, per_device_train_batch_size=batch_size, max_steps=5)
        train(tmp_path, AdaptiveArguments(), base=Records, train_dataset=rows, arguments=options)
        assert checked == passes


@pytest.mark.parametrize("begins_at", [1, 3])
def test_run_with_losses_that_are_nan_continues_like_stock(begins_at: int, tmp_path: Path) -> None:
    def change(trainer: Any, loss: Any) -> Any:
        return loss * (math.nan if trainer.state.global_step + 1 >= begins_at else 1)

    run = train(tmp_path, AdaptiveArguments(), base=changing_loss(change), arguments=arguments(tmp_path))
    assert len(run.log) == STEPS


def two(both: float, first: float = 4.0, second: float = 2.0) -> TwoSamples:
    one, other = BatchLoss(first, Counts(1, 2, 1)), BatchLoss(second, Counts(1, 10, 9))
    return TwoSamples(BatchLoss(both, Counts.total([one.counts, other.counts])), one, other)


ROUNDED = two(0.0062, first=0.004, second=0.002)


@pytest.mark.parametrize(
    ("on_ranks", "options", "reduction"),
    [
        ([two(6.0)], {}, Reduction.SUM),
        ([two(3.0)], {}, Reduction.MEAN_OF_ROWS),
        ([two(28 / 12)], {}, Reduction.MEAN_OF_LABELS),
        ([two(22 / 10)], {}, Reduction.MEAN_OF_NEXT_TOKENS),
        ([two(2.0, first=2.0, second=2.0)], {}, Reduction.MEAN_OF_NEXT_TOKENS),
        ([two(2.5)], {}, None),
        ([two(22 / 10 * 1.001)], {}, None),
        ([two(6.0), two(7.0)], {"tolerance": HALF_TOLERANCE}, None),
        # the rounding of a small loss is compared with earlier losses
        ([ROUNDED], {"tolerance": HALF_TOLERANCE}, None),
        ([ROUNDED], {"tolerance": HALF_TOLERANCE, "scale": 2.0}, Reduction.SUM),
    ],
)
def test_reduction_is_determined_from_the_losses_of_two_samples(
    on_ranks: list[TwoSamples], options: dict[str, float], reduction: Reduction | None
) -> None:
    assert how_losses_add_up(on_ranks, shifts_labels=True, **{"tolerance": FP32_TOLERANCE, **options}) is reduction


def test_metrics_of_a_batch_without_labels_do_not_shift_those_of_later_batches() -> None:
    """A microbatch of which no row counts is a filler, and its metrics are dropped."""
    trainer: Any = type("Trainer", (), {"_metrics": {"train": defaultdict(list)}})()
    metrics, logged = BatchMetrics(trainer, "train"), trainer._metrics["train"]
    for batch, rows, value in (0, 0, 9.0), (1, 2, 3.0), (1, 1, 6.0):
        with metrics.of_microbatch(batch, rows, {}):
            logged["reward"].append(value)
            logged["max_reward"].append(value)
    metrics.end_step(batches=2)
    assert [len(each) for each in metrics._complete] == [0, 2]
    metrics.publish()
    assert dict(logged) == {"reward": [4.0], "max_reward": [6.0]}
