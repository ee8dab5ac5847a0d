"""Steps under a length limit: ranks with different samples run equally many microbatches, and any may be empty."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.count_collectives import ALL_REDUCE, CountCollectives
from tests.distributed.models import (
    VOCABULARY,
    ModelConfig,
    build,
    forward_backward_of,
    runner_of,
)
from tests.ranks import RankFailed, on_ranks, run_on_ranks
from torchtune_adaptive.engine.limits import TokenLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.step import StepRunner

PLAIN = ModelConfig(dropout=0.0)
LENGTHS = [[4, 5, 4, 6, 4, 5], [31, 7, 30, 4, 12, 9]]
"""By rank: with 32 tokens the first needs one microbatch, the second four."""


def samples_here(step: int = 0, lengths: list[list[int]] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    mine = lengths[dist.get_rank()]
    mine = mine[step % len(mine) :] + mine[: step % len(mine)]
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in mine]


FEW = [[9], [30, 29, 31, 28]]
"""Rank 0 has fewer samples than rank 1 needs microbatches."""


@pytest.mark.parametrize(("announced", "spoken"), [(True, [2, 1, 1, 1]), (False, [2, 2, 2, 2])])
@on_ranks(2)
def test_only_unannounced_steps_cost_an_extra_reduction(announced: bool, spoken: list[int]) -> None:
    model = build(PLAIN)
    runner = runner_of(model, TokenLimit(32))
    reductions = []
    for step in range(4):
        upcoming = samples_here(step + 1) if announced and step < 3 else None
        with CountCollectives() as counted:
            runner.run(samples_here(step), step=step, upcoming=upcoming)
        reductions.append(counted.seen[ALL_REDUCE])
        model.zero_grad()
    assert reductions == spoken


def run_with_labels_in_the_filler() -> None:
    model, kind = build(PLAIN), SampleKind[Tensor](length_of=len, filler=lambda sample: sample[:3])
    StepRunner(model, forward_backward_of(model), limit=TokenLimit(32), kind=kind).run(samples_here(0, FEW), step=0)


def test_filler_that_counts_in_the_loss_is_refused():
    with pytest.raises(RankFailed, match="`filler` returned a sample that counts in the loss"):
        run_on_ranks(2, run_with_labels_in_the_filler)


def announce(announcing: tuple[int, ...], then: int) -> list[int]:
    """Return the microbatches of two steps; these ranks announce the samples of the second, which may then differ."""
    model = build(PLAIN)
    runner = runner_of(model, TokenLimit(32))
    upcoming = samples_here(1) if dist.get_rank() in announcing else None
    first = runner.run(samples_here(0), step=0, upcoming=upcoming).microbatches
    model.zero_grad()
    return [first, runner.run(samples_here(then), step=1).microbatches]


def test_samples_announced_by_some_ranks_are_agreed_on_when_they_arrive():
    assert run_on_ranks(2, announce, (0,), 1) == [[4, 4]] * 2


def test_samples_that_differ_from_the_announced_ones_are_refused():
    with pytest.raises(RankFailed, match="the samples differ from `upcoming` of the previous call"):
        run_on_ranks(2, announce, (0, 1), 2)
