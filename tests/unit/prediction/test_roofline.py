"""Work that is counted, as a law, and the time that it takes."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.prediction.cards import CARDS, ONE_CORE
from torchtune_adaptive.prediction.roofline import LIKELY, Timing, as_tensor, fit_work
from torchtune_adaptive.prediction.work import Work, WorkCounter

FLOPS, ATTENTION, MOVED, LINKED, COPIED = range(5)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counter = WorkCounter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.counter.operation(func, args, kwargs or {}, result)
        return result


def test_matrices_are_counted_by_their_products_and_views_not_at_all() -> None:
    with Counting() as counting:
        product = torch.ones(4, 8) @ torch.ones(8, 16)
        product.view(8, 8).t()
    work = as_tensor(counting.counter.work)
    assert work[FLOPS].sum() == 2 * 4 * 8 * 16
    assert work[MOVED, -1] == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert work.shape[1] == 3, "two that fill, one that multiplies"


@pytest.mark.parametrize("with_mask", [False, True])
def test_attention_without_a_mask_leaves_out_half_of_the_scores(with_mask: bool) -> None:
    side = torch.ones(2, 4, 32, 8, device="meta", requires_grad=True)
    mask = torch.zeros(2, 1, 32, 32, device="meta") if with_mask else None
    with Counting() as counting:
        attention = torch.ops.aten._scaled_dot_product_efficient_attention
        outcome = attention(side, side, side, mask, True, is_causal=mask is None)[0]
        forward = as_tensor(counting.counter.work)[ATTENTION].sum()
        outcome.sum().backward()
    scores_and_sums = 4 * 2 * 4 * 32 * 8
    assert forward == (scores_and_sums if with_mask else scores_and_sums / 2)
    assert as_tensor(counting.counter.work)[ATTENTION].sum() == 3.5 * forward


def work_of(rows: int, tokens: int) -> Work:
    """A product, attention, and an update that is there for any size."""
    each = float(rows * tokens)
    return Work(
        flops=array("d", [5e9 * each, 0, 0]),
        attention_flops=array("d", [0, 3e3 * each, 0]),
        moved_bytes=array("d", [2e3 * each, 10 * each, 7e9]),
        linked_bytes=array("d", [0, 0, 0]),
        copied_bytes=array("d", [0, 0, 0]),
    )


def test_a_law_of_work_knows_that_attention_grows_with_the_square() -> None:
    sizes = ((2, 64), (3, 64), (2, 128), (3, 128))
    law = fit_work({size: work_of(*size) for size in sizes}, tokens_multiple=1)
    assert law is not None
    found, expected = law.at(7, 4096), as_tensor(work_of(7, 4096))
    expected[ATTENTION] *= 4096
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1.0)


def test_other_kernels_for_other_sizes_follow_no_law() -> None:
    one_more = Work(*(array("d", [1.0] * 4) for _ in range(5)))
    assert fit_work({(2, 64): work_of(2, 64), (3, 64): one_more}, tokens_multiple=1) is None


def kernels(*each: tuple[float, float], linked: float = 0) -> Tensor:
    work = torch.zeros(5, len(each), dtype=torch.float64)
    work[FLOPS], work[MOVED] = torch.tensor(each, dtype=torch.float64).T
    work[LINKED, 0] = linked
    return work


def timing(ranks: int = 1, host_bytes: int = 0) -> Timing:
    card = CARDS["h100"]
    return Timing(card, half=True, link_bytes_per_s=card.link_bytes_per_s, ranks=ranks, host_bytes=host_bytes)


def test_a_kernel_takes_as_long_as_arithmetic_or_memory_whichever_is_longer() -> None:
    card = CARDS["h100"]
    computes = timing().seconds(kernels((1e14, 1e9))).likely
    assert computes == pytest.approx(1e14 / (card.half_flops * LIKELY.flops))
    moves = timing().seconds(kernels((1e9, 1e11))).likely
    assert moves == pytest.approx(1e11 / (card.bytes_per_s * LIKELY.bandwidth))
    assert timing().seconds(kernels((1e14, 1e9), (1e9, 1e11))).likely == pytest.approx(computes + moves)


def test_a_time_lies_within_its_range() -> None:
    seconds = timing(ranks=8).seconds(kernels((1e14, 1e9), (1e9, 1e11), linked=1e10))
    assert seconds.fast < seconds.likely < seconds.slow < 3 * seconds.fast


def test_collectives_run_beside_kernels_and_one_rank_has_none() -> None:
    quick, slow = kernels((1e14, 0), linked=1e9), kernels((1e14, 0), linked=1e12)
    alone = timing().seconds(slow).likely
    assert timing(ranks=8).seconds(quick).likely == alone
    assert timing(ranks=8).seconds(slow).likely > 10 * alone
    assert timing(ranks=8).seconds(slow).likely > timing(ranks=2).seconds(slow).likely


def test_an_optimizer_on_the_host_makes_a_step_longer() -> None:
    work = kernels((1e14, 0))
    assert timing(host_bytes=10**10).seconds(work).likely > timing().seconds(work).likely


def test_many_small_kernels_are_bound_by_who_launches_them() -> None:
    small = kernels(*[(1.0, 1.0)] * 1000)
    assert timing().seconds(small).likely == 1000 * CARDS["h100"].launch_s
    on_a_core = Timing(ONE_CORE, half=False, link_bytes_per_s=1e9, ranks=1)
    assert on_a_core.seconds(small).likely > 1000 * ONE_CORE.launch_s
