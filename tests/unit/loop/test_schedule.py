"""Batch sizes over a run: how rows become steps, how they grow, and the log at the start."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.unit.data.minimal_config import NEEDED
from torchtune_adaptive.checkpoints.progress import EpochSizes, Progress
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.loop.schedule import (
    Increase,
    build_increase_function,
    double_every,
    schedule_table,
    size_epochs,
    size_run,
    total_steps,
)


def test_optimizer_in_the_backward_needs_a_step_of_one_microbatch() -> None:
    settings = replace(settings_of(16, 1), optimizer_in_bwd=True)
    [sizes] = size_epochs(settings, progress_of(total_epochs=1), 64, rows_that_fit=16)
    assert sizes.microbatches == 1
    with pytest.raises(ConfigError, match="optimizer_in_bwd"):
        size_epochs(settings, progress_of(total_epochs=1), 64, rows_that_fit=8)


sizes_up_to_200 = st.integers(1, 200)


def settings_of(batch_size: int, times: int, **adaptive: Any) -> Settings:
    given = {**NEEDED, "batch_size": batch_size, "gradient_accumulation_steps": times}
    return Settings(**given, adaptive=AdaptiveConfig(**adaptive))


def progress_of(**given: Any) -> Progress:
    return Progress(**{"seed": 0, "epochs_run": 0, "total_epochs": 2, "max_steps_per_epoch": None, "ranks": 1, **given})


def plans_of(
    function: Increase | None,
    epochs: int = 6,
    batch_size: int = 2,
    times: int = 2,
    fits: int | None = None,
    samples: int = 100_000,
    most: int | None = None,
    past: tuple[EpochSizes, ...] = (),
    **adaptive: Any,
) -> tuple[EpochSizes, ...]:
    progress = progress_of(epochs_run=len(past), total_epochs=epochs, max_steps_per_epoch=most, past=past)
    settings = settings_of(batch_size, times, **adaptive)
    return size_epochs(settings, progress, samples, rows_that_fit=fits, increase=function)


def test_an_epoch_in_progress_keeps_its_samples_per_step_on_fewer_ranks_and_with_less_memory() -> None:
    current_epoch = plans_of(None, epochs=1, batch_size=4, times=2, samples=80)[0]
    progress = progress_of(current_epoch=current_epoch, steps_in_epoch=4, step=4, samples_in_epoch=64, ranks=2)
    progress, epochs = size_run(
        settings_of(4, 2), progress, ranks=1, samples_per_rank=160, samples_left_per_rank=96, rows_that_fit=3
    )
    rest, following = epochs
    assert (current_epoch.steps, current_epoch.microbatches, current_epoch.microbatch_rows) == (10, 2, 4)
    assert (rest.samples_per_step, rest.steps, rest.microbatches, rest.microbatch_rows) == (16, 10, 6, 3)
    assert following.steps == 160 // 16
    assert (progress.step, progress.ranks) == (4, 1)
    assert total_steps(epochs) == 10 + 10


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("no.such.function", "'no.such.function'"),
        (
            {"_component_": "torchtune_adaptive.loop.schedule.double_every", "batch_sizes": 5},
            "schedule.double_every: TypeError",
        ),
    ],
)
def test_section_without_a_callable_function_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_increase_function(OmegaConf.create({"batch_increase_function": section}))


@given(sizes_up_to_200, sizes_up_to_200, sizes_up_to_200, st.sampled_from(["rebalance", "fixed", "keep"]))
def test_step_has_the_samples_of_its_mode_in_even_microbatches_that_fit(
    fits: int, batch_size: int, accumulation: int, mode: str
) -> None:
    [step] = plans_of(None, 1, batch_size, accumulation, fits=fits, accumulation=mode)
    configured, rows, microbatches = batch_size * accumulation, step.microbatch_rows, step.microbatches
    samples = {"keep": configured, "fixed": fits * accumulation, "rebalance": max(fits, configured)}[mode]
    assert step.samples_per_step == samples
    assert rows <= fits
    assert (rows - 1) * microbatches < samples <= rows * microbatches
    assert microbatches == accumulation if mode == "fixed" else (microbatches - 1) * fits < samples


@pytest.mark.parametrize(
    ("function", "options", "sizes"),
    [
        (double_every(2), {}, [2, 2, 4, 4, 8, 8]),
        (double_every(1), {"fits": 8}, [2, 4, 8, 8, 8, 8]),
        (double_every(1), {"max_batch_size": 8}, [2, 4, 8, 8, 8, 8]),
        (lambda epoch, _: -2 if epoch else 0, {"batch_size": 12, "fits": 4}, [12, 10, 8, 6, 4, 2]),
    ],
)
def test_batch_sizes_grow_up_to_the_maximum_and_refused_ones_are_shown(
    function: Increase, options: dict[str, int], sizes: list[int]
) -> None:
    plans = plans_of(function, **options)  # type: ignore[arg-type]
    assert [plan.batch_size for plan in plans] == sizes
    assert [plan.refused_batch_size for plan in plans] == [None] * 3 + [16 if 8 in options.values() else None] * 3
    assert all(plan.microbatch_rows <= options.get("fits", 12) for plan in plans)


def test_batch_size_that_did_not_fit_is_reached_once_it_does() -> None:
    def to_six(epoch: int, current: int) -> int:
        return 6 - current if epoch else 0

    tight = plans_of(to_six, fits=4)
    assert {plan.batch_size for plan in tight} == {2}
    roomy = plans_of(to_six, fits=8, past=tight[:4])
    assert [plan.batch_size for plan in roomy] == [2, 2, 2, 2, 6, 6]


@given(st.integers(1, 9), st.integers(1, 4), st.integers(100, 5000), st.one_of(st.none(), st.integers(1, 50)))
def test_epoch_has_every_whole_step_up_to_the_configured_maximum(
    batch_size: int, accumulation: int, samples: int, most: int | None
) -> None:
    plans = plans_of(lambda epoch, _: min(epoch, 1), 6, batch_size, accumulation, samples=samples, most=most)
    for plan in plans:
        if plan.steps != most:
            assert 0 <= samples - plan.steps * plan.samples_per_step < plan.samples_per_step
        assert plan.steps <= (most or plan.steps)


def test_resumed_run_continues_from_its_last_size() -> None:
    whole = plans_of(double_every(2), fits=64)
    for done in range(7):
        assert plans_of(double_every(2), fits=64, past=whole[:done]) == whole
    resumed = plans_of(double_every(2), fits=4, past=whole[:5])
    assert (resumed[:5], resumed[5].batch_size) == (whole[:5], 8)
    assert plans_of(double_every(2), epochs=3, past=whole) == whole[:3]
    steady = plans_of(None, past=whole[:2], fits=3)
    assert (steady[:2], {plan.microbatch_rows for plan in steady[2:]}) == (whole[:2], {2})


@pytest.mark.parametrize(
    ("function", "fact"),
    [
        (lambda *_: True, "epoch 0 and batch size 2, returned True"),
        (lambda epoch, _: -min(epoch, 1), "epoch 2 and batch size 1, returned -1"),
        (lambda epoch, _: "2" if epoch else 0, "epoch 1 and batch size 2, returned '2'"),
        (double_every(0), "epoch 1 and batch size 2, raised ZeroDivisionError"),
        (math.pi, "epoch 0 and batch size 2, raised TypeError"),
        (double_every, "a section with its _component_"),
    ],
)
def test_invalid_increase_is_an_error_before_training(function: Any, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        plans_of(function, samples=99_999)


def test_schedule_merges_equal_epochs_and_shows_refused_sizes() -> None:
    plans = plans_of(double_every(2), batch_size=4, fits=8, samples=1000)
    assert schedule_table(plans, ranks=8) == (
        "batch schedule · 6 epochs · 498 steps\n"
        "  epoch   batch size   rows × microbatches   samples a step   steps\n"
        "  0-1     4            4 × 2                 64               125\n"
        "  2-3     8            8 × 2                 128              62\n"
        "  4       8            8 × 2                 128              62      "
        "<- 16 requested, above the bound\n"
        "  5       8            8 × 2                 128              62"
    )
    assert all("by tokens" in line for line in schedule_table(plans, 2, by_tokens=True).splitlines()[2:])
