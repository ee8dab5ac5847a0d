"""StepRunner in one process, on a model without FSDP, and the faults that tests inject."""

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.fault_injection import FaultInjector
from tests.simulated_memory import FakeMemory
from torchtune_adaptive.engine.limit_policy import EXHAUSTED, RECOVERY
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import LimitExhaustedError, RecoveryUnsupportedError, Remedy

SAMPLES = [torch.arange(16.0) * scale for scale in range(1, 9)]
KIND = SampleKind(length_of=len, filler=lambda sample: sample)


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 1))


def forward_backward_of(model: nn.Module) -> Callable[[Sequence[Tensor]], Totals]:
    def forward_backward(samples):
        loss = model(torch.stack(list(samples))).square().sum()
        loss.backward()
        return Totals(loss.detach(), len(samples))

    return forward_backward


def runner_of(model: nn.Module, rows: int, **options) -> StepRunner[Tensor]:
    """Pass options that belong neither to a runner nor to its step to Recovery."""
    forward_backward, stage = options.pop("forward_backward", forward_backward_of(model)), options.pop("stage", "")
    recovery = Recovery(model, **options)
    return StepRunner(model, forward_backward, kind=KIND, limit=RowLimit(rows), recovery=recovery, stage=stage)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def test_closed_runner_refuses_to_run():
    runner = runner_of(a_model(), rows=2)
    runner.close()
    for run in (lambda: runner.run(SAMPLES, step=1), lambda: runner.attempt([SAMPLES[:2]])):
        with pytest.raises(ValueError, match="this StepRunner is closed"):
            run()


def test_losses_are_summed_in_single_precision():
    model = a_model()

    def in_half(samples):
        model(torch.stack(list(samples))).sum().backward()
        return Totals(torch.tensor(257.0, dtype=torch.bfloat16 if len(samples) == 1 else torch.float32), len(samples))

    result = runner_of(model, 1, forward_backward=in_half).run(SAMPLES, step=0)
    assert result.loss_sum.dtype == torch.float32
    assert result.loss_sum.item() == 8 * 256  # the loss of a microbatch keeps its own precision


def test_keeping_the_error_does_not_keep_the_failed_pass():
    model, kept, live_bytes = a_model(), [], []
    forward_backward = forward_backward_of(model)

    def keeping(samples):
        live_bytes.append(meter.live_bytes)
        try:
            return forward_backward(samples)
        except torch.OutOfMemoryError as error:
            kept.append(error)
            raise

    runner = runner_of(model, 8, forward_backward=keeping)
    in_backward = 30
    with MemoryMeter() as meter, FaultInjector(runner).fail_at(rank=0, step=0, operation=in_backward):
        runner.run(SAMPLES, step=0)
    assert len(kept) == 1
    assert live_bytes[1] == live_bytes[0]


def test_run_ends_at_one_row_that_does_not_fit_and_continues_once_the_caller_has_freed_memory():
    undisturbed = a_model()
    torch.manual_seed(1)
    loss_sum = runner_of(undisturbed, 1).run(SAMPLES, step=0).loss_sum.item()
    # the limit shrinks from the rows that ran, not from the allowed rows
    runner = runner_of(model := a_model(), 16, on_change=(changes := []).append)
    torch.manual_seed(1)
    with MemoryMeter(cap_bytes=100) as meter:
        with pytest.raises(LimitExhaustedError) as caught:
            runner.run(SAMPLES, step=3)
        assert [each.kind for each in changes] == [RECOVERY] * 4 + [EXHAUSTED]
        last = changes[-1]
        assert (last.step, last.before, last.after, last.ranks) == (3, 1, 1, (0,))
        assert last.reason == caught.value.fact
        meter.cap_bytes = None
        result = runner.run(SAMPLES, step=3)
    assert (runner.limit, runner.recoveries, result.recoveries) == (RowLimit(1), 4, 0)
    assert (result.target_tokens, result.microbatches, result.loss_sum.item()) == (8, 8, loss_sum)
    assert all(map(torch.equal, gradients(model), gradients(undisturbed)))


def test_error_of_a_forward_only_stage_names_memory_but_not_checkpointing():
    model = a_model()

    def ask(samples):
        with torch.no_grad():
            return Totals(model(torch.stack(list(samples))).sum(), len(samples))

    runner = runner_of(model, 8, forward_backward=ask)
    runner.run(SAMPLES, step=2)
    for watched in (False, True):
        with MemoryMeter(cap_bytes=100) as meter:
            runner.measure_memory(meter if watched else None)
            with pytest.raises(LimitExhaustedError) as caught:
                runner.run(SAMPLES, step=3)
        assert bool(re.search(r"\(peak .* budget of 100 B\)", caught.value.fact)) == watched
        expected = [Remedy.SHORTER_SAMPLES, Remedy.MORE_RANKS, *([Remedy.LARGER_BUDGET] if watched else [])]
        assert list(caught.value.remedies) == expected


@pytest.mark.parametrize("recovers", [True, False])
def test_thrashing_is_detected_in_watched_memory_without_repeating_steps(recovers: bool):
    model, memory, events = a_model(), FakeMemory(), []
    runner = runner_of(model, 8, on_change=events.append, enabled=recovers)
    assert runner.run(SAMPLES, step=0).memory is None
    runner.measure_memory(memory)
    for step in range(1, 4):
        model.zero_grad()
        memory.retries += step >= 2
        result = runner.run(SAMPLES, step=step)
        assert (result.retries, result.recoveries, result.memory) == (int(step >= 2), 0, (700, 1000))
    changes = [(event.kind, event.step, event.before, event.after) for event in events]
    assert (runner.limit, changes) == ((RowLimit(4), [("thrashing", 3, 8, 4)]) if recovers else (RowLimit(8), []))
    assert all((event.ranks, event.peak_bytes) == ((0,), 700) for event in events)


def test_attempt_runs_the_given_microbatches_and_keeps_the_limit():
    model = a_model()
    runner = runner_of(model, 128)
    with MemoryMeter() as meter:
        meter.count(model.parameters())
        meter.cap_bytes = meter.live_bytes + 10_000
        result, reports = runner.attempt([SAMPLES[:1], 16 * SAMPLES])
        assert (result, list(reports.failed)) == (None, [0])
        assert gradients(model) == [None] * 4
        result, _ = runner.attempt([SAMPLES[:1], SAMPLES[1:4]])
    assert (result.target_tokens, result.microbatches) == (4, 2)
    assert all(gradient is not None for gradient in gradients(model))
    assert runner.limit == RowLimit(128)


@pytest.mark.parametrize(
    "returned",
    [
        *(torch.ones(()), None),
        *(Totals(loss, 3) for loss in (1.5, torch.ones((), requires_grad=True))),
        *(Totals(torch.ones(()), tokens) for tokens in (-3, 2.5, float("nan"))),
        Totals(torch.ones(()), 3, {"margin": 2}),
    ],
)
def test_microbatch_that_returns_no_totals_is_an_error_with_the_remedy(returned: object):
    runner = runner_of(a_model(), 8, forward_backward=lambda samples: returned)
    with pytest.raises((TypeError, ValueError), match=r"must (return Totals|be a detached scalar|be a whole number)"):
        runner.run(SAMPLES, step=0)


def train_a_model_of_another_stage() -> None:
    policy, value = a_model(), a_model()

    def train_both(samples):
        loss = (policy(torch.stack(list(samples))) + value(torch.stack(list(samples)))).square().sum()
        loss.backward()
        return Totals(loss.detach(), len(samples))

    recovery = Recovery(policy, value)
    StepRunner(policy, train_both, kind=KIND, limit=RowLimit(4), recovery=recovery).run(SAMPLES, step=0)


def run_twice() -> None:
    runner = runner_of(a_model(), 8)
    for step in range(2):
        runner.run(SAMPLES, step=step)


def take_a_stage_twice() -> None:
    recovery = Recovery(model := a_model())
    for _ in range(2):
        StepRunner(model, forward_backward_of(model), kind=KIND, limit=RowLimit(1), recovery=recovery)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (run_twice, r"gradients from before this step.*zero_grad"),
        (take_a_stage_twice, "has a runner for stage '' already: give each its own `stage`"),
        (train_a_model_of_another_stage, "gradients in the model of another stage"),
        (lambda: runner_of(a_model(), 8).run([], step=0), "at least 1 sample"),
        (
            lambda: StepRunner(a_model(), print, kind=KIND, limit=RowLimit(1), recovery=Recovery(a_model())),
            r"pass it to Recovery\(\.\.\.\)",
        ),
        (lambda: Recovery(regrow_after=-1), "regrow_after: -1 steps; give 0"),
    ],
)
def test_invalid_calls_are_refused_with_the_remedy(wrong: Callable[[], object], text: str):
    with pytest.raises((TypeError, ValueError), match=text):
        wrong()


def test_step_is_not_repeated_after_hooks_have_used_its_gradients():
    model = a_model()
    runner = runner_of(model, 8)
    for parameter in model.parameters():  # after Recovery has searched for hooks
        parameter.register_post_accumulate_grad_hook(lambda each: each.data.sub_(each.grad))
    faults = FaultInjector(runner).fail_at(rank=0, step=0, operation=5)
    with faults, pytest.raises(RecoveryUnsupportedError, match="hooks"):
        runner.run(SAMPLES, step=0)


@pytest.mark.parametrize("error", [KeyError("mine"), torch.OutOfMemoryError("mine")])
def test_unrecoverable_errors_pass_through_steps_and_commits_unchanged(error: Exception):
    def broken(samples):
        raise error

    runner = runner_of(a_model(), 8, forward_backward=broken, enabled=isinstance(error, KeyError))
    with pytest.raises(type(error), match="mine"):
        runner.run(SAMPLES, step=0)
    with pytest.raises(KeyError, match="mine"), runner.committing("a step", last_checkpoint=None):
        raise KeyError("mine")
