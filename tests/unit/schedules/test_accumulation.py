import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.schedules.accumulation import (
    ACCUMULATION_MODES,
    LR_SCALINGS,
    Accumulation,
    accumulate,
    lr_factor,
)

sizes = st.integers(1, 200)


def of(rows: int, batch_size: int, gradient_accumulation_steps: int, mode: str) -> Accumulation:
    return accumulate(rows, batch_size=batch_size, gradient_accumulation_steps=gradient_accumulation_steps, mode=mode)


@given(sizes, sizes, sizes)
def test_keep_never_changes_the_samples_per_step(rows: int, batch_size: int, steps: int) -> None:
    step = of(rows, batch_size, steps, "keep")
    assert step.samples_per_step == batch_size * steps
    assert step.growth == 1


@given(sizes, sizes, sizes)
def test_fixed_leaves_gradient_accumulation_alone(rows: int, batch_size: int, steps: int) -> None:
    step = of(rows, batch_size, steps, "fixed")
    assert (step.rows, step.microbatches, step.samples_per_step) == (rows, steps, rows * steps)
    assert step.growth == pytest.approx(rows / batch_size)


@given(sizes, sizes, sizes)
def test_rebalance_grows_the_step_only_if_one_microbatch_holds_more_than_all_of_it(
    rows: int, batch_size: int, steps: int
) -> None:
    configured = batch_size * steps
    step = of(rows, batch_size, steps, "rebalance")
    if rows <= configured:
        assert step.samples_per_step == configured
    else:
        assert step == Accumulation(rows, 1, rows, rows / configured)


@given(sizes, sizes, sizes, st.sampled_from(ACCUMULATION_MODES))
def test_no_microbatch_is_above_what_fits_and_together_they_hold_the_step(
    rows: int, batch_size: int, steps: int, mode: str
) -> None:
    step = of(rows, batch_size, steps, mode)
    assert step.rows <= rows
    assert (step.rows - 1) * step.microbatches < step.samples_per_step <= step.rows * step.microbatches


@given(sizes, sizes, sizes, st.sampled_from(["keep", "rebalance"]))
def test_one_microbatch_fewer_would_not_hold_the_step(rows: int, batch_size: int, steps: int, mode: str) -> None:
    step = of(rows, batch_size, steps, mode)
    assert (step.microbatches - 1) * rows < step.samples_per_step


@pytest.mark.parametrize(
    ("mode", "rows", "expected"),
    [
        ("rebalance", 8, Accumulation(8, 4, 32, 1.0)),
        ("rebalance", 32, Accumulation(32, 1, 32, 1.0)),
        ("rebalance", 64, Accumulation(64, 1, 64, 2.0)),
        ("rebalance", 1, Accumulation(1, 32, 32, 1.0)),
        ("rebalance", 6, Accumulation(6, 6, 32, 1.0)),
        ("fixed", 8, Accumulation(8, 16, 128, 4.0)),
        ("fixed", 1, Accumulation(1, 16, 16, 0.5)),
        ("keep", 8, Accumulation(8, 4, 32, 1.0)),
        ("keep", 64, Accumulation(32, 1, 32, 1.0)),
    ],
)
def test_two_rows_in_sixteen_microbatches_become(mode: str, rows: int, expected: Accumulation) -> None:
    assert of(rows, 2, 16, mode) == expected


def test_the_learning_rate_follows_the_growth_as_asked() -> None:
    assert [lr_factor(4.0, scaling) for scaling in LR_SCALINGS] == [1.0, 2.0, 4.0]
    assert [lr_factor(0.25, scaling) for scaling in LR_SCALINGS] == [1.0, 0.5, 0.25]


def test_an_unknown_mode_or_scaling_names_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match=r"mode: 'most'.*rebalance, fixed, keep"):
        of(1, 1, 1, "most")
    with pytest.raises(ConfigError, match=r"lr_scaling: 'square'.*none, sqrt, linear"):
        lr_factor(2.0, "square")
