"""Results and errors of `find_max_batch_size` on one device."""

from dataclasses import replace

import pytest
import torch

from tests.searched_model import (
    Shape,
    Trained,
    between,
    brute_force,
    drawn_budgets,
    measured_peaks,
    search_within,
)
from torchtune_adaptive.engine.memory import MemoryMeter
from torchtune_adaptive.engine.probes import find_max_batch_size
from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError

SIZES = range(1, 25)


# About 1 in 100 draws has a bend between the third size and the result, which costs a fifth probe: seed 1 does.
@pytest.mark.parametrize("seed", [0, *range(2, 9)])
def test_result_equals_brute_force(seed: int):
    with MemoryMeter() as meter:
        trained = Trained(Shape.drawn(seed))
        peaks = measured_peaks(trained, meter, SIZES)
        for draw in range(3):
            budgets = drawn_budgets(peaks, 100 * seed + draw)
            best = brute_force(peaks, budgets)
            linear = search_within(trained.step(), meter, budgets[0])
            assert search_within(trained.step(), meter, budgets[0], strategy="binary").rows == best
            assert 0.95 * best <= linear.rows <= best
            assert len(linear.probes) <= 4
            assert linear.out_of_memory_count == 0


@pytest.mark.parametrize("strategy", ["linear", "binary"])
def test_accumulated_gradients_count_only_if_a_step_has_several_microbatches(strategy: str):
    with MemoryMeter() as meter:
        trained = Trained(Shape(vocabulary=64, dim=64, hidden=512))  # gradients take as much memory as three rows
        alone = measured_peaks(trained, meter, SIZES, whole_step_rows=1)
        budget = between(alone[0], 12)
        assert brute_force(measured_peaks(trained, meter, SIZES), [budget]) == 9
        for whole_step_rows, rows in [(1, 12), (10, 12), (12, 12), (13, 9), (None, 9)]:
            found = search_within(trained.step(), meter, budget, strategy=strategy, whole_step_rows=whole_step_rows)
            assert (found.rows, found.accumulates) == (rows, rows == 9)
            accumulates = "accumulated gradients in memory" if rows == 9 else "a step is one microbatch"
            assert accumulates in found.reason


def test_state_of_another_stage_is_in_memory_during_a_search():
    with MemoryMeter() as meter:
        policy, critic = Trained(Shape(length=24)), Trained(Shape(vocabulary=200, layers=1))
        measured_peaks(critic, meter, [1])
        budget = between(measured_peaks(policy, meter, SIZES)[0], 12)
        critic.optimizer.state.clear()
        result = search_within(replace(policy.step(), other_stages=(critic.step(),)), meter, budget)
        alone = search_within(policy.step(), meter, budget)
    assert result.rows == 12 < alone.rows


@pytest.mark.parametrize("strategy", ["linear", "binary", "decrease"])
@pytest.mark.parametrize("short_of", ["one row", "the update", "the weights"])
def test_one_row_that_does_not_fit_is_an_error_with_all_numbers(strategy: str, short_of: str):
    with MemoryMeter() as meter:
        trained = Trained(Shape(length=64 if short_of == "one row" else 4))
        need = measured_peaks(trained, meter, [1])[0][0]
        cap = {"one row": need - 1, "the update": need - 1, "the weights": meter.live_bytes - 1}[short_of]
        with pytest.raises(OneRowDoesNotFitError) as raised:
            search_within(trained.step(), meter, cap, strategy=strategy, max_rows=8)
    assert raised.value.budget_bytes == cap
    assert raised.value.need_bytes == pytest.approx(need, abs=200)
    assert f"one row of {trained.shape.length} tokens needs" in str(raised.value)
    assert "on rank 0, whose budget is" in str(raised.value)


@pytest.mark.parametrize(
    ("cap_bytes", "message"), [(1_000_000, "with meter"), (None, "to search within; set cap_bytes of MemoryMeter")]
)
def test_search_without_a_budget_is_refused(cap_bytes: int | None, message: str):
    with pytest.raises((ValueError, ConfigError), match=message):
        find_max_batch_size(Trained(Shape()).step(), memory=MemoryMeter(cap_bytes))


def test_existing_gradients_are_refused_and_kept():
    with MemoryMeter() as meter:
        trained = Trained(Shape())
        trained.forward_backward([trained.sample])
        gradients = [parameter.grad.clone() for parameter in trained.model.parameters()]
        with pytest.raises(ValueError, match="zero_grad"):
            search_within(trained.step(), meter, 400_000)
        after = [parameter.grad for parameter in trained.model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(gradients, after, strict=True))


def test_error_other_than_out_of_memory_ends_the_search_and_reports_the_rows():
    class Refusing(Trained):
        def forward_backward(self, samples):
            if len(samples) > 1:
                raise RuntimeError("no kernel for this size")
            return super().forward_backward(samples)

    with MemoryMeter() as meter, pytest.raises(RuntimeError, match="no kernel") as raised:
        search_within(Refusing(Shape()).step(), meter, 400_000)
    assert raised.value.__notes__ == ["(raised while the batch size search measured a microbatch of 2 rows)"]
