"""Gradient noise, compared with exact gradients of single samples."""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from torchtune_adaptive import RowLimit, SampleKind, StepRunner, TokenLimit, Totals
from torchtune_adaptive.engine.noise import FEWEST, Interval, NoiseScale, StepNoise

Sample = torch.Tensor
"""[tokens, 5]: four inputs and the target."""
KIND = SampleKind[Sample](length_of=len, stand_in=lambda sample: sample[:1])


def samples_of(generator: torch.Generator, count: int, alike: float = 0.0) -> list[Sample]:
    """Return samples of 1 to 8 tokens; `alike` is the fraction of noise shared by all tokens of a sample."""
    truth = torch.tensor([1.0, -2.0, 0.5, 0.3])
    samples = []
    for length in torch.randint(1, 9, (count,), generator=generator).tolist():
        inputs = torch.randn(length, 4, generator=generator)
        own, shared = (torch.randn(size, generator=generator) for size in (length, 1))
        noise = math.sqrt(1 - alike) * own + math.sqrt(alike) * shared
        samples.append(torch.cat([inputs, (inputs @ truth + 3 * noise)[:, None]], dim=1))
    return samples


def loss_of(model: nn.Module, samples: Sequence[Sample]) -> torch.Tensor:
    tokens = torch.cat(list(samples))
    return (model(tokens[:, :4])[:, 0] - tokens[:, 4]).square().sum()


def forward_backward(model: nn.Module, samples: Sequence[Sample]) -> Totals:
    loss = loss_of(model, samples)
    loss.backward()
    return Totals(loss.detach(), sum(map(len, samples)))


def a_runner(limit: RowLimit | TokenLimit) -> StepRunner[Sample]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return StepRunner(model, partial(forward_backward, model), kind=KIND, limit=limit)


def measured(runner: StepRunner[Sample], samples: Sequence[Sample], step: int = 1) -> StepNoise | None:
    runner.measure_noise(1)
    result = runner.run(samples, step=step)
    gradients = torch.cat([each.grad.flatten() for each in runner.model.parameters() if each.grad is not None])
    runner.model.zero_grad(set_to_none=True)
    assert result.squares is not None
    norm = float(gradients.norm()) / result.target_tokens
    return StepNoise.of(result.squares, norm, result.target_tokens, by_samples=False)


def exact(model: nn.Module, samples: Sequence[Sample]) -> tuple[float, float]:
    """Return |G|² and the noise of a batch of one sample, from per-sample gradients in double precision."""
    model = deepcopy(model).double()
    lengths = torch.tensor([len(sample) for sample in samples], dtype=torch.float64)
    rows = []
    for sample in samples:
        grads = torch.autograd.grad(loss_of(model, [sample.double()]), list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    gradients = torch.stack(rows)
    mean = gradients.sum(0) / lengths.sum()
    residuals = gradients - lengths[:, None] * mean
    return float(mean.square().sum()), float(residuals.square().sum(1).mean() / lengths.mean() ** 2)


@pytest.mark.parametrize("alike", [0.0, 1.0], ids=["independent tokens", "correlated tokens"])
def test_estimates_equal_exact_gradients_of_single_samples(alike: float) -> None:
    generator, runner = torch.Generator().manual_seed(1), a_runner(RowLimit(4))
    signal, noise = exact(runner.model, samples_of(generator, 5_000, alike))
    steps = [measured(runner, samples_of(generator, 16, alike), step) for step in range(1, 401)]
    found = [torch.tensor([step[at] for step in steps if step is not None]) for at in (0, 1)]
    for estimates, truth in zip(found, (signal, noise), strict=True):
        error = estimates.std() / math.sqrt(len(estimates))
        assert abs(estimates.mean() - truth) < 3 * error
        assert error < 0.05 * truth


def test_single_microbatch_gives_no_noise_estimate() -> None:
    assert measured(a_runner(RowLimit(16)), samples_of(torch.Generator(), 16)) is None


def test_95_percent_of_intervals_contain_the_truth() -> None:
    generator, inside = torch.Generator().manual_seed(3), 0
    for _ in range(400):
        scale = NoiseScale()
        for signal, noise in (torch.randn(60, 2, generator=generator) * 0.5 + torch.tensor([1.0, 20.0])).tolist():
            scale.record(StepNoise(signal, noise))
        interval = scale.interval()
        assert interval is not None
        inside += interval.low <= 20 <= interval.high
    assert 0.92 <= inside / 400 <= 0.98


def test_signal_below_the_noise_has_no_upper_bound() -> None:
    scale = NoiseScale()
    for at in range(20):
        scale.record(StepNoise(0.1 + (-1.0) ** at, 5.0))
    interval = scale.interval()
    assert interval is not None
    assert interval.high == math.inf
    assert 1 < interval.low < interval.scale == pytest.approx(50, rel=0.2)


def test_too_few_steps_give_no_interval_and_a_resumed_average_continues() -> None:
    whole, first = NoiseScale(), NoiseScale()
    for at in range(FEWEST - 1):
        for each in (whole, first):
            each.record(StepNoise(1.0, 2.0 + at))
    assert whole.interval() is None
    resumed = NoiseScale(first.state())
    for each in (whole, resumed):
        each.record(StepNoise(1.0, 2.0))
    assert isinstance(whole.interval(), Interval)
    assert whole.interval() == resumed.interval()
