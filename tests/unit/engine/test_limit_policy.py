"""Policies near the memory limit, without a device: reports of ranks go in, the limit comes out."""

import json
from collections.abc import Callable
from functools import partial
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.engine.limit_policy import (
    EXHAUSTED,
    GROWTH,
    RECOVERY,
    THRASHING,
    Change,
    LimitPolicy,
)
from torchtune_adaptive.engine.limits import Limit, MicrobatchSize, RowLimit, Surface, SurfaceLimit, TokenLimit

AFTER = 10
"""Steps without memory problems before the limit grows."""
ALONE = {1: MicrobatchSize(1, 600)}


class Run:
    """A policy that receives steps of eight rows of 100 tokens."""

    def __init__(self, allowed: Limit | None = None, regrow_after: int = AFTER) -> None:
        self.policy = LimitPolicy(allowed or RowLimit(8), regrow_after=regrow_after)
        self.events: list[Change] = []
        self.step = 0

    @property
    def rows(self) -> int:
        return self.policy.limit.size

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def microbatch(self) -> MicrobatchSize:
        return MicrobatchSize(max(1, self.policy.limit.rows_at(100)), 100)

    def quiet(self, steps: int = 1) -> None:
        self._complete(steps, {})

    def retries(self, steps: int = 1, on: int = 3) -> None:
        self._complete(steps, {on: self.microbatch()})

    def out_of_memory(self, on: int = 3) -> None:
        self.events.append(self.policy.out_of_memory({on: self.microbatch()}, self.step))

    def one_row_fails(self) -> None:
        self.policy.begin_step()
        self.policy.out_of_memory(ALONE, self.step)

    def once_reduced_step_fails(self) -> None:
        self.policy.out_of_memory({3: self.microbatch()}, self.step, reduced_once=True)

    def _complete(self, steps: int, flushed_cache: dict[int, MicrobatchSize]) -> None:
        for _ in range(steps):
            self.step += 1
            self.policy.begin_step()
            if (event := self.policy.completed(self.step, flushed_cache)) is not None:
                self.events.append(event)


SURFACE = SurfaceLimit({"layers": Surface(fixed_bytes=10_000, bytes_per_token=10)}, budget_bytes=20_000)
allowed_limits = st.sampled_from([RowLimit(64), RowLimit(5), TokenLimit(1000), SURFACE])
histories = st.lists(
    st.integers(1, 3 * AFTER).map(lambda steps: [Run.quiet] * steps)
    | st.sampled_from([Run.retries, Run.out_of_memory, Run.one_row_fails, Run.once_reduced_step_fails]).map(
        lambda failure: [failure]
    ),
    max_size=12,
).map(lambda parts: [*chain(*parts)])
"""What happens in each step of a run."""


@given(allowed_limits, st.sampled_from([0, 1, AFTER]), histories)
def test_limit_rises_by_one_size_after_quiet_steps_up_to_the_allowed_limit(
    allowed: Limit, regrow_after: int, history: list[Callable[[Run], None]]
) -> None:
    run, quiet = Run(allowed, regrow_after), 0
    for happens in history:
        before = run.policy.limit
        happens(run)
        quiet = quiet + 1 if happens is Run.quiet else 0
        if run.rows > before.size:
            assert quiet >= regrow_after > 0
            assert run.rows == min(before.next_size, allowed.size)
            quiet = 0
    lowest = run.policy.limit
    run.quiet(100 * AFTER)
    assert run.policy.limit == (allowed if regrow_after else lowest)


@given(allowed_limits, histories, histories)
def test_resumed_policy_continues_like_an_uninterrupted_one(
    allowed: Limit, before: list[Callable[[Run], None]], after: list[Callable[[Run], None]]
) -> None:
    run, resumed = Run(allowed), Run(allowed)
    for happens in [*before, Run.quiet]:
        happens(run)
    resumed.policy.restore(json.loads(json.dumps(run.policy.state())))
    for happens in after:
        happens(run)
        happens(resumed)
        assert resumed.policy.limit == run.policy.limit
        assert resumed.policy.state() == run.policy.state()


def test_only_retries_in_two_consecutive_steps_lower_the_limit():
    run = Run()
    for _ in range(20):
        run.retries(on=0)
        run.quiet()
    assert (run.rows, run.events) == (8, [])
    run.retries(on=0)
    run.retries()
    assert (run.rows, run.kinds, run.events[0].ranks) == (4, [THRASHING], (3,))
    run.quiet(AFTER)
    assert run.rows == 8


def test_thrashing_at_the_smallest_limit_is_reported_once():
    run = Run(RowLimit(1))
    run.retries(50)
    assert (run.rows, run.kinds) == (1, [THRASHING])


@pytest.mark.parametrize("fail", [Run.out_of_memory, partial(Run.retries, steps=2), Run.one_row_fails])
def test_wait_doubles_after_a_failure_on_probation_and_is_normal_after_a_later_one(fail: Callable[[Run], None]):
    run = Run()
    run.out_of_memory()
    for wait in (AFTER, 2 * AFTER, 4 * AFTER):
        run.quiet(wait - 1)
        assert run.rows == 4
        run.quiet()
        assert run.rows == 8
        fail(run)
        assert run.rows == 4
    run.quiet(8 * AFTER + 3 * AFTER)
    run.out_of_memory()
    run.quiet(AFTER)
    assert run.rows == 8


def test_allowed_size_is_the_bound_and_a_failed_size_is_remembered():
    run = Run()
    run.out_of_memory()
    run.policy.allow(RowLimit(16))
    assert run.rows == 4
    run.policy.allow(RowLimit(2))
    assert run.rows == 2
    run.policy.allow(RowLimit(16))
    run.quiet(3 * AFTER)
    assert run.rows == 16
    run.out_of_memory()
    run.policy.allow(TokenLimit(4096))  # in another unit, what was observed does not count
    assert run.policy.limit == TokenLimit(4096)


def test_state_of_another_kind_of_limit_restores_only_counters_and_an_invalid_one_is_refused():
    run = Run(TokenLimit(4096))
    other = Run(RowLimit(8))
    other.out_of_memory()
    run.policy.restore(other.policy.state())
    assert run.policy.limit == TokenLimit(4096)
    assert run.policy.recoveries == 1
    with pytest.raises(ValueError, match=r"missing before_growth, .*, unit"):
        run.policy.restore({})


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(TokenLimit(8192), [8192, 4096, 2048, 1024, 512]), (RowLimit(8), [8, 4, 2, 1]), (RowLimit(1), [1])],
)
def test_row_that_fails_alone_is_retried_once_in_each_run_of_a_step_and_then_lowers_the_limit_by_one_size(
    limit: Limit, sizes: list[int]
):
    policy = LimitPolicy(limit, regrow_after=0)
    for tried in (sizes, sizes[-1:]):  # updates of one iteration
        policy.begin_step()
        failures = [policy.out_of_memory(ALONE, step=3) for _ in (*tried, 0)]
        assert [each.after for each in failures] == [*tried, tried[-1]]
        assert [each.kind for each in failures] == [RECOVERY] * len(tried) + [EXHAUSTED]
        assert policy.recoveries == len(sizes) + (tried is not sizes)
        assert "1 row of 600 tokens does not fit and cannot be made smaller" in failures[-1].reason
        if tried == [8, 4, 2, 1]:
            assert "a single row failed again: microbatch at most 8 rows -> 4 rows" in failures[1].reason


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_failure_of_several_rows_is_not_a_single_row_failure(order: tuple[int, int]):
    sizes = (MicrobatchSize(4, 20), *ALONE.values())
    policy = LimitPolicy(RowLimit(8), regrow_after=0)
    policy.out_of_memory({rank: sizes[rank] for rank in order}, step=1)
    assert policy.limit == RowLimit(2)


def test_resumed_policy_waits_according_to_its_own_regrow_after():
    before, resumed = Run(regrow_after=200), Run(regrow_after=1)
    before.out_of_memory()
    resumed.policy.restore(before.policy.state())
    resumed.quiet()
    assert resumed.kinds == [GROWTH]
