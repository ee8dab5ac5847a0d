"""All ranks change the limit together, based on the step's single agreement."""

import torch.distributed as dist

from tests.distributed.count_collectives import ALL_REDUCE, CountCollectives
from tests.distributed.models import ModelConfig, build, runner_of, samples_of
from tests.ranks import run_on_ranks
from tests.simulated_memory import FakeMemory
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
