"""As few traces as it takes to know that one row does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.prediction.made_up import MIB, recording
from torchtune_adaptive.errors import OneRowDoesNotFitError
from torchtune_adaptive.prediction.recorder import Recording
from torchtune_adaptive.tune.trace.laws import OneRow, laws_of


class MadeUpStep:
    settings = SimpleNamespace(compile=False)
    tokens_multiple, on_gpu = 1, False
    least_bytes = 10 * MIB

    def __init__(self) -> None:
        self.traced: list[tuple[int, int]] = []

    def most_tokens(self, unbounded: int) -> int:
        return unbounded

    def record(self, rows: int, tokens: int, *, counting: bool) -> Recording:
        self.traced.append((rows, tokens))
        return recording(rows, tokens)


def traces_until_known(tokens: int, usable_mib: int) -> list[tuple[int, int]]:
    step: Any = MadeUpStep()
    with pytest.raises(OneRowDoesNotFitError, match=f"one row of {tokens} tokens needs .* or more"):
        laws_of(step, tokens, lambda: None, one_row=OneRow(tokens, usable_mib * MIB))
    return step.traced


def test_what_is_there_without_activations_is_enough_to_know_without_a_trace() -> None:
    assert traces_until_known(64, usable_mib=9) == []


def test_as_many_tokens_as_those_of_the_row_are_enough_in_one_trace() -> None:
    assert traces_until_known(4096, usable_mib=200) == [(2, 2048)]


def test_fewer_rows_than_are_traced_are_no_reason_to_refuse() -> None:
    step: Any = MadeUpStep()
    law, _ = laws_of(step, 2048, lambda: None, one_row=OneRow(2048, 200 * MIB))
    assert sorted(step.traced) == [(2, 1024), (2, 2048), (3, 1024), (3, 2048)]
    assert law.peak(1, 2048).peak_bytes == 136 * MIB


def test_a_row_that_fits_has_the_law_that_it_has_without_the_question() -> None:
    step: Any = MadeUpStep()
    asked, _ = laws_of(step, 4096, lambda: None, one_row=OneRow(4096, 1000 * MIB))
    plain, _ = laws_of(step, 4096, lambda: None)
    assert asked.coefficients.equal(plain.coefficients)
    assert asked.program.of_block == plain.program.of_block
