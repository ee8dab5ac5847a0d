"""Steps under a length limit: ranks with different samples run equally many microbatches, and any may be empty."""

import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.count_collectives import ALL_REDUCE, CountCollectives
from tests.distributed.models import (
    VOCABULARY,
    ModelConfig,
    build,
    forward_backward_of,
    gradients_equal,
    gradients_of,
)
from tests.fault_injection import FaultInjector
from tests.ranks import RankFailed, on_ranks, run_on_ranks
from torchtune_adaptive.engine.limits import Limit, TokenLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.step import StepRunner

PLAIN = ModelConfig(dropout=0.0)
LENGTHS = [[4, 5, 4, 6, 4, 5], [31, 7, 30, 4, 12, 9], [8, 16, 8, 16, 8, 16]]
"""By rank: with 32 tokens the first needs one microbatch, the second four, the third three."""


def samples_here(step: int = 0, lengths: list[list[int]] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    mine = lengths[dist.get_rank()]
    mine = mine[step % len(mine) :] + mine[: step % len(mine)]
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in mine]


def without_labels(sample: Tensor) -> Tensor:
    return sample[:1]  # the loss is that of the next token, so one token has no loss


def runner_of(
    model: nn.Module,
    limit: Limit,
    *,
    joined: bool = False,
    filler: Callable[[Tensor], Tensor] = without_labels,
) -> StepRunner[Tensor]:
    kind = SampleKind(length_of=len, filler=filler, padded=not joined)
    return StepRunner(model, forward_backward_of(model, joined=joined), limit=limit, kind=kind)


FEW = [[9], [30, 29, 31, 28], [12, 14]]
"""Ranks 0 and 2 have fewer samples than rank 1 needs microbatches."""


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


def recover(fail_at: int, joined: bool) -> str:
    """Return the smaller limit; check that this and the next step are bitwise those of another run under it."""
    logging.disable(logging.WARNING)
    disturbed = build(PLAIN)
    runner = runner_of(disturbed, TokenLimit(64), joined=joined)
    runner.run(samples_here(9), step=0, upcoming=samples_here(0))
    disturbed.zero_grad()
    with FaultInjector(runner).fail_at(rank=1, step=1, operation=fail_at):
        runner.run(samples_here(0), step=1, upcoming=samples_here(1))
    first = gradients_of(disturbed)
    disturbed.zero_grad()
    runner.run(samples_here(1), step=2)
    undisturbed = build(PLAIN)
    reference = runner_of(undisturbed, runner.limit, joined=joined)
    reference.run(samples_here(0), step=1)
    expected = gradients_of(undisturbed)
    undisturbed.zero_grad()
    reference.run(samples_here(1), step=2)
    assert gradients_equal(first, expected)
    assert gradients_equal(gradients_of(disturbed), gradients_of(undisturbed))
    assert runner.recoveries == 1
    return str(runner.limit)


def recover_everywhere(joined: bool) -> list[str]:
    return [recover(fail_at, joined) for fail_at in (5, 60, 200, 450)]


@pytest.mark.parametrize(("world_size", "joined"), [(3, False), (2, True)])
def test_recovered_step_and_the_next_announced_step_use_the_smaller_limit(world_size: int, joined: bool):
    limits = run_on_ranks(world_size, recover_everywhere, joined)
    assert limits == limits[:1] * world_size
    assert {*limits[0]} <= {"32 tokens", "16 tokens"}


def run_with_labels_in_the_filler() -> None:
    runner_of(build(PLAIN), TokenLimit(32), filler=lambda sample: sample[:3]).run(samples_here(0, FEW), step=0)


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
