"""The answer of a search: its reason, its errors, its record."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.laws import MIB, Device, affine, refuse_nothing
from torchtune_adaptive.engine.search import STRATEGIES, Peak, Room, search
from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"round_to": "none"}, "8.9 fit"),
        ({}, "8.9 fit, rounded down to a power of two"),
        (
            {"round_to": "divisor", "samples_per_step": 30},
            "8.9 fit, rounded down to a divisor of the samples per step",
        ),
        ({"max_rows": 4}, "limited to 4"),
        ({"max_rows": 4, "samples_per_step": 8}, "limited to 4"),
        ({"max_rows": 8, "samples_per_step": 8}, "all 8 samples of a step"),
        ({"max_rows": 7}, "limited to 7, rounded down to a power of two"),
        ({"max_rows": 7, "strategy": "binary"}, "limited to 7, rounded down to a power of two"),
        ({"strategy": "binary"}, "16 did not fit"),
        ({"strategy": "binary", "round_to": "none"}, "9 did not fit"),
    ],
)
def test_the_reason_says_why_not_more(options: dict[str, Any], reason: str) -> None:
    device = Device(affine((1050, 100)), 1945 * MIB)
    assert device.search(**options).reason == reason


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_row_is_the_answer_where_two_do_not_fit_even_with_retries(strategy: str) -> None:
    device = Device(affine((0, 1000)), 1999 * MIB, retries_above=0)
    assert device.search(strategy=strategy, max_rows=4).rows == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_row_that_runs_out_of_memory_is_an_error_without_a_need(strategy: str) -> None:
    device = Device(affine((0, 1000)), 999 * MIB)
    with pytest.raises(OneRowDoesNotFitError, match=r"runs out of memory.*999.0 MiB") as caught:
        device.search(strategy=strategy, max_rows=4)
    assert (caught.value.need_bytes, caught.value.budget_bytes) == (None, 999 * MIB)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_row_over_a_soft_budget_is_an_error_that_names_its_need(strategy: str) -> None:
    device = Device(affine((0, 1000)), 999 * MIB, soft=True)
    with pytest.raises(OneRowDoesNotFitError, match=r"needs 1000.0 MiB .* 999.0 MiB; .* more ranks") as caught:
        device.search(strategy=strategy, max_rows=4)
    assert caught.value.need_bytes == 1000 * MIB


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "guess"}, r"strategy: 'guess'.*linear, binary, decrease"),
        ({"round_to": "ten"}, r"round_to: 'ten'.*power_of_two, none, divisor"),
        ({"round_to": "divisor"}, r"round_to: 'divisor'.*samples_per_step"),
        ({"max_rows": 0}, r"max_rows: 0.*1 or more"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_what_can(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Device(affine((1, 1)), 9 * MIB).search(**options)


def test_phases_that_come_and_go_are_refused() -> None:
    def measure(rows: int) -> Peak:
        names: Mapping[str, int] = {"a": rows, "b": 1} if rows == 1 else {"a": rows}
        return Peak(names, fits=True)

    with pytest.raises(ValueError, match="same phases"):
        search(measure, Room(10), refuse=refuse_nothing)
