"""A rank for which the others wait is named, by what each of them has measured of itself."""

import time
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from tests.distributed.models import ModelConfig, build, forward_backward_of, samples_of
from tests.hearing import listening
from tests.ranks import run_on_ranks
from torchtune_adaptive.comm.ledger import CollectiveLedger
from torchtune_adaptive.limits.limit import RowLimit
from torchtune_adaptive.step.pace import STEPS_LOOKED_AT, Pace
from torchtune_adaptive.step.runner import StepRunner, Totals
from torchtune_adaptive.step.samples import SampleKind


def log_of_steps(slow_rank: int | None, where: str, stages: Sequence[str] = ("",)) -> list[str]:
    """What is said of steps of one stage or several, which share what they share in a recipe."""
    model = build(ModelConfig(layers=1, dropout=0.0))
    forward_backward, samples = forward_backward_of(model), samples_of(dist.get_rank(), 1)

    def sleep_here(place: str) -> None:
        if dist.get_rank() == slow_rank and place == where:
            time.sleep(0.15)

    def slowly(place: str, samples: Sequence[Tensor]) -> Totals:
        sleep_here(place)
        return forward_backward(samples)

    shared = {"ledger": CollectiveLedger(model), "pace": Pace()} if len(stages) > 1 else {}
    runners = [
        StepRunner(
            model,
            partial(slowly, stage or "forward"),
            limit=RowLimit(1),
            kind=SampleKind(length_of=len, stand_in=lambda sample: sample[:2]),
            stage=stage,
            **shared,
        )
        for stage in stages
    ]
    with listening() as lines:
        for step in range(1, STEPS_LOOKED_AT + 2):
            sleep_here("dataset")
            for runner in runners:
                runner.run(samples, step=step)
                model.zero_grad(set_to_none=True)
    return lines


def test_a_slow_rank_is_named_on_rank_0_whether_its_model_or_its_dataset_is_slow():
    for where in ("forward", "dataset"):
        first, second = run_on_ranks(2, log_of_steps, 1, where)
        assert second == []
        (line,) = first
        assert (
            f"step {STEPS_LOOKED_AT}: rank 1 holds the others up: in the last {STEPS_LOOKED_AT} steps it worked "
            in line
        )


def test_a_rank_that_is_slow_in_one_stage_of_three_is_named_once():
    first, second = run_on_ranks(2, log_of_steps, 1, "second", ("first", "second", "third"))
    assert second == []
    (line,) = first
    assert f"step {STEPS_LOOKED_AT}: rank 1 holds the others up" in line


def test_ranks_that_are_alike_are_not_told_of():
    assert run_on_ranks(2, log_of_steps, None, "") == [[], []]
