"""All ranks change the limit together, based on the step's single agreement."""

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from tests.distributed.count_collectives import ALL_REDUCE, CountCollectives
from tests.distributed.models import ModelConfig, build, runner_of, samples_of
from tests.ranks import RankFailed, run_on_ranks
from tests.simulated_memory import FakeMemory
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit
from torchtune_adaptive.engine.recovery import Recovery


def thrash_on_rank_1() -> tuple[list[int], int, list[tuple[str, tuple[int, ...]]]]:
    """Return for this rank the rows of each step, the number of agreements, and the events."""
    model, memory, events = build(ModelConfig(dropout=0.0)), FakeMemory(), []
    recovery = Recovery(model, regrow_after=3, on_change=lambda event: events.append((event.kind, event.ranks)))
    runner = runner_of(model, 4, recovery=recovery)
    runner.measure_memory(memory)
    rows = []
    with CountCollectives() as counted:
        for step in range(14):
            memory.retries += dist.get_rank() == 1 and step in (2, 3)
            rows.append(runner.limit.rows)
            runner.run(samples_of(dist.get_rank(), 4), step=step)
            model.zero_grad()
    return rows, counted.seen[ALL_REDUCE], events


def test_thrashing_on_one_rank_changes_the_limit_of_all_without_extra_collectives():
    healthy, thrashing = run_on_ranks(2, thrash_on_rank_1)
    assert healthy == thrashing
    rows, agreements, events = healthy
    assert rows[:5] == [4, 4, 4, 4, 2]
    assert agreements == len(rows)
    assert events[0] == ("thrashing", (1,))


def peak_of_the_fullest_rank() -> tuple[int, int]:
    runner = runner_of(build(ModelConfig()), 4)
    runner.measure_memory([FakeMemory(peak_bytes=700), FakeMemory(budget_bytes=500, peak_bytes=400)][dist.get_rank()])
    memory = runner.run(samples_of(dist.get_rank(), 4), step=0).memory
    assert memory is not None
    return memory


def test_fullest_rank_is_closest_to_its_budget():
    assert run_on_ranks(2, peak_of_the_fullest_rank) == [(400, 500)] * 2


def run_unevenly(counts: Sequence[Sequence[int]], limits: Sequence[Limit]) -> None:
    """Collective: train with these numbers of samples per rank and step, under these limits."""
    model = build(ModelConfig(dropout=0.0))
    runner = runner_of(model, limit=limits[dist.get_rank()])
    for step, count in enumerate(counts[dist.get_rank()]):
        runner.run(samples_of(dist.get_rank(), count), step=step)
        model.zero_grad()


ROWS = (RowLimit(2), RowLimit(2))


@pytest.mark.parametrize(
    ("counts", "limits", "message"),
    [
        (([8], [6]), ROWS, "4 microbatches, 3 microbatches"),
        (([8, 8], [8, 6]), ROWS, "as before, 3 microbatches"),
        (([8, 10], [8, 8]), ROWS, "5 microbatches, as before"),
        (([8], [8]), (RowLimit(2), RowLimit(4)), "4 microbatches, 2 microbatches"),
        (([8], [8]), (RowLimit(2), TokenLimit(16)), "4 microbatches, by length"),
    ],
)
def test_different_sample_counts_or_limits_end_the_step_with_an_error(
    counts: tuple[list[int], list[int]], limits: tuple[Limit, Limit], message: str
) -> None:
    with pytest.raises(RankFailed, match=rf"numbers of microbatches in one step \({message}, by rank\)"):
        run_on_ranks(2, run_unevenly, counts, limits, timeout_s=10)


def test_sample_count_may_change_if_it_changes_on_all_ranks() -> None:
    run_on_ranks(2, run_unevenly, [[8, 8, 4, 8]] * 2, ROWS)
