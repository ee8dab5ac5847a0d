"""Steps under a limit by length: ranks with other samples still run as many microbatches, and any may be empty."""

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.counting import ALL_REDUCE, CountCollectives
from tests.distributed.models import (
    VOCABULARY,
    Gradients,
    ModelConfig,
    build,
    forward_backward_of,
    gradients_of,
    same_gradients,
)
from tests.hearing import listening
from tests.ranks import RankFailed, run_on_ranks
from torchtune_adaptive.engine.limits import Limit, RowLimit, Surface, SurfaceLimit, TokenLimit
from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.engine.step import SampleKind, StepRunner
from torchtune_adaptive.errors import LimitExhaustedError
from torchtune_adaptive.testing import FaultInjector

PLAIN = ModelConfig(dropout=0.0)
LENGTHS = [[4, 5, 4, 6, 4, 5], [31, 7, 30, 4, 12, 9], [8, 16, 8, 16, 8, 16]]
"""By rank: within 32 tokens the first needs one microbatch, the second four, the third three."""
SURFACE = SurfaceLimit({"layers": Surface(100.0, 1.0, 1.0)}, budget_bytes=140)


def samples_here(step: int = 0, lengths: list[list[int]] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    mine = lengths[dist.get_rank()]
    mine = mine[step % len(mine) :] + mine[: step % len(mine)]
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in mine]


def without_labels(sample: Tensor) -> Tensor:
    return sample[:1]  # the loss is that of the next token: one token alone has none


def runner_of(
    model: nn.Module,
    limit: Limit,
    *,
    joined: bool = False,
    filler: Callable[[Tensor], Tensor] | None = without_labels,
) -> StepRunner[Tensor]:
    kind = SampleKind(length_of=len, stand_in=lambda sample: sample[:2], filler=filler, padded=not joined)
    return StepRunner(model, forward_backward_of(model, joined=joined), limit=limit, kind=kind)


def close(left: Gradients, right: Gradients) -> bool:
    return all(torch.allclose(left[name], right[name], rtol=1e-5, atol=1e-5) for name in left)


def step_by_rows_and_by_length() -> list[int]:
    """The microbatches on this rank under each limit, padded and joined."""
    found = []
    by_rows = build(PLAIN)
    expected = runner_of(by_rows, RowLimit(2)).run(samples_here(), step=0)
    for limit, joined in itertools.product((TokenLimit(32), SURFACE), (False, True)):
        by_length = build(PLAIN)
        result = runner_of(by_length, limit, joined=joined).run(samples_here(), step=0)
        assert result.target_tokens == expected.target_tokens
        assert result.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-5)
        assert close(gradients_of(by_length), gradients_of(by_rows)), (limit, joined)
        found.append(result.microbatches)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_gradient_is_that_of_microbatches_by_rows(world_size: int):
    by_rank = run_on_ranks(world_size, step_by_rows_and_by_length)
    assert by_rank == by_rank[:1] * world_size


def reductions_of_steps(announced: bool) -> list[int]:
    """How often the ranks spoke in each of four steps, besides FSDP."""
    model = build(PLAIN)
    runner = runner_of(model, TokenLimit(32))
    spoken = []
    for step in range(4):
        upcoming = samples_here(step + 1) if announced and step < 3 else None
        with CountCollectives() as counted:
            runner.run(samples_here(step), step=step, upcoming=upcoming)
        spoken.append(counted.seen[ALL_REDUCE])
        model.zero_grad()
    return spoken


@pytest.mark.parametrize(("announced", "spoken"), [(True, [2, 1, 1, 1]), (False, [2, 2, 2, 2])])
def test_only_steps_that_were_not_announced_cost_a_small_reduction_of_their_own(announced: bool, spoken: list[int]):
    assert run_on_ranks(2, reductions_of_steps, announced) == [spoken] * 2


def recover(fail_at: int, joined: bool) -> str:
    """The smaller limit, under which this and the next step are bitwise those of another run."""
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
    assert same_gradients(first, expected)
    assert same_gradients(gradients_of(disturbed), gradients_of(undisturbed))
    assert runner.recoveries == 1
    return str(runner.limit)


def recover_everywhere(joined: bool) -> list[str]:
    return [recover(fail_at, joined) for fail_at in (5, 60, 200, 450)]


@pytest.mark.parametrize(("world_size", "joined"), [(3, False), (2, True)])
def test_a_recovered_step_and_the_announced_one_after_it_run_under_the_smaller_limit(world_size: int, joined: bool):
    limits = run_on_ranks(world_size, recover_everywhere, joined)
    assert limits == limits[:1] * world_size
    assert {*limits[0]} <= {"32 tokens", "16 tokens"}


FEW = [[9], [30, 29, 31, 28], [12, 14]]
"""Ranks 0 and 2 have fewer samples than rank 1 needs microbatches."""


def fill_up() -> tuple[int, int, bool]:
    """Microbatches, target tokens, and whether the gradient is that of all samples in one process' autograd."""
    model = build(PLAIN)
    result = runner_of(model, TokenLimit(32)).run(samples_here(0, FEW), step=0)
    reference = build(PLAIN)
    forward_backward = forward_backward_of(reference)
    samples = samples_here(0, FEW)
    for index in range(4):  # the same collectives on all ranks, with a loss of zero where there is no sample left
        if index < len(samples):
            forward_backward(samples[index : index + 1])
        else:
            (reference(samples[0][None]).sum() * 0.0).backward()
    return result.microbatches, result.target_tokens, close(gradients_of(model), gradients_of(reference))


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_empty_microbatch_adds_nothing_and_hangs_nobody(world_size: int):
    tokens = sum(length - 1 for lengths in FEW[:world_size] for length in lengths)
    assert run_on_ranks(world_size, fill_up) == [(4, tokens, True)] * world_size


def fail_in_an_empty_microbatch() -> str:
    """The error that this rank ends with."""
    model = build(PLAIN)
    runner = runner_of(model, TokenLimit(32))
    samples = samples_here(0, FEW)
    runner.run(samples, step=0)
    model.zero_grad()
    in_its_third_microbatch = 900  # which is empty
    with FaultInjector(runner).fail_at(rank=0, step=1, operation=in_its_third_microbatch, times=3):
        try:
            runner.run(samples, step=1)
        except LimitExhaustedError as error:
            return str(error)
    return "no error"


def test_running_out_of_memory_where_nothing_is_smaller_ends_all_ranks_with_the_same_error():
    first, second = run_on_ranks(2, fail_in_an_empty_microbatch)
    assert first == second
    assert first.startswith("step 1: out of memory on rank 0 (longest sample 1 tokens): a microbatch of 1 row")


def run_masked(rank_without_labels: int) -> tuple[int, bool, bool]:
    """Microbatches, whether all gradients are finite, and whether this rank's samples changed nothing."""
    model = build(PLAIN)

    def forward_backward(samples):
        tokens = nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
        labels = torch.full_like(tokens, -100) if dist.get_rank() == rank_without_labels else tokens
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss.backward()
        return Totals(loss.detach(), int((labels != -100).sum()))

    kind = SampleKind(length_of=len, stand_in=lambda s: s[:2], filler=without_labels)
    result = StepRunner(model, forward_backward, limit=TokenLimit(32), kind=kind).run(samples_here(), step=0)
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients_of(model).values())
    expected = sum(map(sum, LENGTHS[:2])) - sum(LENGTHS[rank_without_labels])
    return result.microbatches, finite, result.loss_sum.isfinite().item() and result.target_tokens >= expected


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_any_label_hangs_nobody_and_leaves_no_nan(rank: int):
    assert run_on_ranks(2, run_masked, rank) == [(4, True, True)] * 2


def run_with_a_wrong(filler: Callable[[Tensor], Tensor] | None) -> None:
    runner_of(build(PLAIN), TokenLimit(32), filler=filler).run(samples_here(0, FEW), step=0)


def three_tokens(sample: Tensor) -> Tensor:
    return sample[:3]


@pytest.mark.parametrize(
    ("filler", "told"),
    [
        (None, r"rank 0 has fewer samples .* give its SampleKind a `filler`"),
        (three_tokens, "`filler` returned a sample that counts in the loss"),
    ],
)
def test_no_filler_and_one_that_counts_in_the_loss_are_refused(filler: Callable[[Tensor], Tensor], told: str):
    with pytest.raises(RankFailed, match=told):
        run_on_ranks(2, run_with_a_wrong, filler)


def announce(announcing: tuple[int, ...], then: int) -> list[int]:
    """The microbatches of two steps, the second on samples that these ranks have announced, or on others."""
    model = build(PLAIN)
    runner = runner_of(model, TokenLimit(32))
    upcoming = samples_here(1) if dist.get_rank() in announcing else None
    first = runner.run(samples_here(0), step=0, upcoming=upcoming).microbatches
    model.zero_grad()
    return [first, runner.run(samples_here(then), step=1).microbatches]


def test_samples_that_only_some_ranks_announce_are_agreed_on_when_they_come():
    assert run_on_ranks(2, announce, (0,), 1) == [[4, 4]] * 2


def test_samples_other_than_those_that_were_announced_are_refused():
    with pytest.raises(RankFailed, match="the samples differ from those announced as `upcoming`"):
        run_on_ranks(2, announce, (0, 1), 2)


def shrink_together() -> list[str]:
    """Two ranks run out of memory in one attempt, in microbatches of other sizes."""
    model = build(PLAIN)
    runner = runner_of(model, TokenLimit(64))
    runner.run(samples_here(), step=0)
    model.zero_grad()
    with listening() as lines, FaultInjector(runner).fail_at(rank=dist.get_rank(), step=412, operation=40):
        runner.run(samples_here(), step=412)
    return [*lines, str(runner.limit)]


def test_the_log_names_the_tokens_of_the_microbatch_and_the_new_limit():
    ([line, limit], others) = run_on_ranks(2, shrink_together)
    longest = max(*LENGTHS[0], *LENGTHS[1])
    assert line.startswith(f"step 412: out of memory on ranks 0, 1 (longest sample {longest} tokens): microbatch ")
    assert line.endswith(("-> 8 tokens, step repeated", "-> 16 tokens, step repeated"))
    assert [limit] == others
