from dataclasses import fields
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.schedules.accumulation import LR_SCALINGS, Accumulation, lr_factor
from torchtune_adaptive.schedules.growth import (
    EpochSizes,
    Increase,
    Outline,
    add_every,
    double_every,
    function_name,
    milestones,
    simulate,
    steady,
    total_steps,
)


def sizes_of(function: Increase, epochs: int = 6, batch_size: int = 2, **options: Any) -> list[int]:
    return [plan.batch_size for plan in plans_of(function, epochs, batch_size, **options)]


def plans_of(function: Increase, epochs: int = 6, batch_size: int = 2, **options: Any) -> tuple[EpochSizes, ...]:
    own = {field.name: options.pop(field.name) for field in fields(Outline) if field.name in options}
    outline = Outline(**{"epochs": epochs, "samples_per_rank": 100_000, **own})
    return simulate(function, outline, **{"batch_size": batch_size, "gradient_accumulation_steps": 2, **options})


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (double_every(2), [2, 2, 4, 4, 8, 8]),
        (double_every(1), [2, 4, 8, 16, 32, 64]),
        (add_every(3, 5), [2, 2, 2, 7, 7, 7]),
        (milestones({1: 6, 4: 3}), [2, 6, 6, 6, 3, 3]),
        (milestones({0: 9}), [9, 9, 9, 9, 9, 9]),
        (milestones({}), [2, 2, 2, 2, 2, 2]),
    ],
)
def test_built_ins_give_these_batch_sizes(function: Increase, sizes: list[int]) -> None:
    assert sizes_of(function) == sizes


def test_the_function_is_asked_once_for_every_epoch_with_the_size_then_current() -> None:
    asked: list[tuple[int, int]] = []

    def increase(*arguments: int) -> int:
        asked.append(arguments)  # type: ignore[arg-type]
        return 1

    sizes_of(increase, epochs=3)
    assert asked == [(0, 2), (1, 3), (2, 4)]


def test_an_increase_up_to_what_fits_is_taken_and_one_above_is_skipped_and_told() -> None:
    plans = plans_of(double_every(1), max_batch_size=8)
    assert [plan.batch_size for plan in plans] == [2, 4, 8, 8, 8, 8]
    assert [plan.refused_batch_size for plan in plans] == [None, None, None, 16, 16, 16]


def test_a_smaller_increase_after_a_skipped_one_is_taken() -> None:
    assert sizes_of(lambda epoch, size: [0, 100, 3][epoch], epochs=3, max_batch_size=8) == [2, 2, 5]


def test_beyond_memory_a_step_can_grow_in_more_microbatches() -> None:
    plans = plans_of(double_every(2), max_batch_size=3, beyond_memory="accumulate")
    assert [plan.samples_per_step for plan in plans] == [4, 4, 8, 8, 16, 16]
    assert [(plan.microbatches, plan.microbatch_rows) for plan in plans[::2]] == [(2, 2), (3, 3), (6, 3)]


def test_beyond_memory_can_be_an_error_that_names_epoch_size_and_bound() -> None:
    with pytest.raises(ConfigError, match=r"epoch 4 .* batch size of 8, but at most 7 fit"):
        plans_of(double_every(2), max_batch_size=7, beyond_memory="error")


@pytest.mark.parametrize("beyond_memory", ["skip", "error", "accumulate"])
def test_a_start_above_what_fits_is_split_and_may_shrink(beyond_memory: str) -> None:
    plans = plans_of(add_every(1, -3), epochs=3, batch_size=12, max_batch_size=4, beyond_memory=beyond_memory)
    assert [plan.batch_size for plan in plans] == [12, 9, 6]
    assert [(plan.microbatches, plan.microbatch_rows) for plan in plans] == [(6, 4), (5, 4), (3, 4)]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 50),
    st.sampled_from(["skip", "accumulate"]),
)
def test_no_microbatch_is_ever_above_what_fits(
    increases: list[int], batch_size: int, accumulation: int, most: int, beyond_memory: str
) -> None:
    plans = simulate(
        lambda epoch, _: increases[epoch],
        Outline(epochs=len(increases), samples_per_rank=10**6),
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_batch_size=most,
        beyond_memory=beyond_memory,
    )
    for plan in plans:
        assert plan.microbatch_rows <= most
        assert plan.microbatches * plan.microbatch_rows >= plan.samples_per_step
        assert plan.samples_per_step == plan.batch_size * accumulation


@given(st.integers(1, 9), st.integers(1, 4), st.integers(100, 5000), st.one_of(st.none(), st.integers(1, 50)))
def test_an_epoch_has_every_whole_step_up_to_the_configured_most(
    batch_size: int, accumulation: int, samples: int, most: int | None
) -> None:
    plans = plans_of(
        add_every(1, 1),
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        samples_per_rank=samples,
        max_steps_per_epoch=most,
    )
    for plan in plans:
        if plan.steps != most:
            assert 0 <= samples - plan.steps * plan.samples_per_step < plan.samples_per_step
        assert plan.steps <= (most or plan.steps)
    assert total_steps(plans) == sum(plan.steps for plan in plans)


@pytest.mark.parametrize("scaling", LR_SCALINGS)
def test_the_learning_rate_factor_is_that_of_the_growth_since_the_configured_step(scaling: str) -> None:
    plans = plans_of(milestones({0: 4, 2: 8}), lr_scaling=scaling)
    assert [plan.lr_factor for plan in plans] == [lr_factor(plan.batch_size / 2, scaling) for plan in plans]


def test_an_epoch_without_a_single_step_is_an_error_before_training() -> None:
    with pytest.raises(ConfigError, match=r"epoch 2: a step takes 16 samples, but a rank has only 15"):
        plans_of(milestones({2: 8}), samples_per_rank=15)


def test_a_resumed_run_continues_from_the_size_that_was_not_from_what_would_be_today() -> None:
    whole = plans_of(double_every(2), max_batch_size=64)
    for done in range(7):
        assert plans_of(double_every(2), max_batch_size=64, past=whole[:done]) == whole
    asked: list[int] = []

    def today(epoch: int, current_batch_size: int) -> int:
        asked.append(epoch)
        return double_every(2)(epoch, current_batch_size)

    resumed = plans_of(today, max_batch_size=4, past=whole[:5])
    assert resumed[:5] == whole[:5]
    assert resumed[5].batch_size == 8
    assert asked == [5]


def test_a_milestone_that_did_not_fit_is_reached_once_it_does() -> None:
    tight = plans_of(milestones({1: 6}), max_batch_size=4)
    assert {plan.batch_size for plan in tight} == {2}
    roomy = plans_of(milestones({1: 6}), max_batch_size=8, past=tight[:4])
    assert [plan.batch_size for plan in roomy] == [2, 2, 2, 2, 6, 6]


def test_a_run_resumed_for_fewer_epochs_ends_where_it_was() -> None:
    whole = plans_of(double_every(2))
    assert plans_of(double_every(2), epochs=3, past=whole) == whole[:3]


def raises(epoch: int, current_batch_size: int) -> int:
    if epoch == 3:
        raise KeyError("table")
    return 0


@pytest.mark.parametrize("returned", [1.0, True, "1", None, [1]])
def test_what_is_not_an_int_is_an_error_that_names_function_epoch_and_value(returned: Any) -> None:
    def wrong(epoch: int, current_batch_size: int) -> Any:
        return returned if epoch == 2 else 0

    with pytest.raises(ConfigError) as caught:
        sizes_of(wrong)
    for part in (f"{__name__}.test_what_is_not_an_int", "epoch 2", repr(returned), "an int"):
        assert part in str(caught.value)


def test_a_function_that_raises_is_named_with_its_epoch_and_error() -> None:
    with pytest.raises(ConfigError, match=rf"{__name__}.raises at epoch 3, .*KeyError: 'table'") as caught:
        sizes_of(raises)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_leaves_no_sample_is_named_with_its_epoch() -> None:
    with pytest.raises(ConfigError, match=r"add_every at epoch 2, batch size 1, returned -1, which leaves 0"):
        sizes_of(add_every(1, -1))
    assert sizes_of(add_every(1, -1), epochs=2) == [2, 1]


def test_functions_are_called_by_the_name_a_user_gave_them() -> None:
    class Callable_:
        def __call__(self, epoch: int, current_batch_size: int) -> int:
            return 0

    assert function_name(double_every(1)) == "torchtune_adaptive.schedules.growth.double_every"
    assert function_name(raises) == f"{__name__}.raises"
    assert "partial" in function_name(partial(raises, 1))
    assert function_name(Callable_()).startswith(f"{__name__}.test_functions")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: double_every(0), "double_every: epochs cannot be 0; allowed: an int from 1"),
        (lambda: double_every(True), "double_every: epochs cannot be True"),
        (lambda: add_every(1.5, 1), "add_every: epochs cannot be 1.5"),  # type: ignore[arg-type]
        (lambda: add_every(1, "2"), "add_every: amount cannot be '2'; allowed: an int"),  # type: ignore[arg-type]
        (lambda: milestones({-1: 2}), "milestones: an epoch cannot be -1; allowed: an int from 0"),
        (lambda: milestones({1: 0}), "milestones: the batch size at epoch 1 cannot be 0"),
        (lambda: milestones([1, 2]), r"milestones: \[1, 2\]; allowed"),  # type: ignore[arg-type]
    ],
)
def test_a_built_in_refuses_what_it_cannot_do(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_a_step_that_does_not_grow_is_the_same_in_every_epoch_after_the_past_ones() -> None:
    step = Accumulation(rows=4, microbatches=3, samples_per_step=10, growth=1.0)
    past = plans_of(double_every(1), epochs=2)
    plans = steady(step, Outline(epochs=4, samples_per_rank=95, max_steps_per_epoch=8, past=past))
    assert plans[:2] == past
    assert [(plan.epoch, plan.samples_per_step, plan.microbatch_rows, plan.steps) for plan in plans[2:]] == [
        (2, 10, 4, 8),
        (3, 10, 4, 8),
    ]


def test_unknown_words_name_the_allowed_ones() -> None:
    function = double_every(2)
    with pytest.raises(ConfigError, match=r"beyond_memory: 'grow'.*skip, accumulate, error"):
        plans_of(function, beyond_memory="grow")
    with pytest.raises(ConfigError, match=r"lr_scaling: 'cubic'.*none, sqrt, linear"):
        plans_of(function, lr_scaling="cubic")
