"""StepRunner in one process, on a model that knows nothing of FSDP."""

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.injection import Injector
from torchtune_adaptive.cpu_memory import MemoryMeter
from torchtune_adaptive.errors import LimitExhaustedError
from torchtune_adaptive.limits import RowLimit
from torchtune_adaptive.stepping import StepRunner, Totals

SAMPLES = [torch.arange(16.0) * scale for scale in range(1, 9)]


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 1))


def runner_of(model: nn.Module, rows: int, injector: Injector | None = None) -> StepRunner[Tensor]:
    def forward_backward(samples):
        with (injector or Injector()).watching():
            loss = model(torch.stack(list(samples))).square().sum()
            loss.backward()
            return Totals(loss.detach(), len(samples))

    return StepRunner(model, forward_backward, limit=RowLimit(rows), length_of=len, stand_in=lambda s: s)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def undisturbed(rows: int) -> tuple[list[Tensor], float]:
    model = a_model()
    torch.manual_seed(1)
    result = runner_of(model, rows).run(SAMPLES, step=0)
    return gradients(model), result.loss_sum.item()


@pytest.mark.parametrize("operation", range(1, 60, 7))
def test_a_recovered_step_is_bitwise_one_that_never_failed(operation: int):
    model, injector = a_model(), Injector()
    runner = runner_of(model, 4, injector)
    injector.arm([operation])
    torch.manual_seed(1)
    result = runner.run(SAMPLES, step=0)
    expected, loss_sum = undisturbed(rows=2)
    assert all(map(torch.equal, gradients(model), expected))
    assert result.loss_sum.item() == loss_sum
    assert (result.target_tokens, result.microbatches, result.recoveries) == (8, 4, 1)
    assert (runner.limit, runner.recoveries) == (RowLimit(2), 1)


def test_the_limit_stays_for_the_steps_that_follow():
    model, injector = a_model(), Injector()
    runner = runner_of(model, 8, injector)
    injector.arm([5])
    runner.run(SAMPLES, step=0)
    model.zero_grad()
    result = runner.run(SAMPLES, step=1)
    assert (result.microbatches, result.recoveries, runner.recoveries) == (2, 0, 1)


def step_within(cap_bytes: int | None) -> tuple[int, int]:
    """The peak of a step and its recoveries."""
    model = a_model()
    runner = runner_of(model, 128)
    with MemoryMeter(cap_bytes) as meter:
        meter.count(model.parameters())
        runner.run(16 * SAMPLES, step=0)
    return meter.peak_bytes, runner.recoveries


def test_a_step_that_needs_more_memory_than_there_is_runs_in_smaller_microbatches():
    need_bytes, recoveries = step_within(None)
    assert recoveries == 0
    _, recoveries = step_within(int(0.8 * need_bytes))
    assert recoveries > 0


def test_somebody_who_keeps_the_error_does_not_keep_the_failed_pass():
    injector, kept, live_bytes = Injector(), [], []
    runner = runner_of(a_model(), 8, injector)
    forward_backward = runner._attempts.forward_backward

    def keeping(samples):
        live_bytes.append(meter.live_bytes)
        try:
            return forward_backward(samples)
        except torch.OutOfMemoryError as error:
            kept.append(error)
            raise

    runner._attempts.forward_backward = keeping
    injector.arm([30])  # in backward
    with MemoryMeter() as meter:
        runner.run(SAMPLES, step=0)
    assert len(kept) == 1
    assert live_bytes[1] == live_bytes[0]


def test_one_row_that_does_not_fit_ends_the_run_with_its_length():
    model = a_model()
    runner = runner_of(model, 8)
    message = (
        r"step 3: out of memory on rank 0 \(longest sample 16 tokens\): a microbatch of 1 row of 16 tokens does not fit"
    )
    with MemoryMeter(cap_bytes=100), pytest.raises(LimitExhaustedError, match=message):
        runner.run(SAMPLES, step=3)


def test_left_over_gradients_are_refused():
    model = a_model()
    runner = runner_of(model, 8)
    runner.run(SAMPLES, step=0)
    with pytest.raises(ValueError, match=r"gradients are left over .*zero_grad"):
        runner.run(SAMPLES, step=1)


def test_a_step_without_samples_is_refused():
    with pytest.raises(ValueError, match="at least 1 sample"):
        runner_of(a_model(), 8).run([], step=0)
