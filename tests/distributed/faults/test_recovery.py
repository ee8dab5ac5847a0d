"""What a recovery leaves behind, and what ghost passes compute and cost. test_sweeps.py compares the steps."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tests.distributed.faults.bench import Bench
from tests.distributed.faults.meshes import OnMesh, split_layers
from tests.distributed.faults.scenarios import SCENARIOS
from tests.distributed.models import (
    ModelConfig,
    build,
    gradients_equal,
    gradients_of,
    runner_of,
)
from tests.fault_injection import FaultInjector, wrapping_passes
from tests.ranks import on_ranks
from torchtune_adaptive.engine import fsdp, ghost
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner


def is_gathered(model: nn.Module) -> bool:
    return fsdp.awaits_backward(model) or not all(group.is_sharded for group in fsdp.groups_of(model))


@pytest.mark.parametrize("recover", [True, False])
@on_ranks(2)
def test_stage_without_backward_leaves_no_parameters_gathered(recover: bool) -> None:
    """Writing into gathered parameters, as a search does at its end, would be lost."""
    model, tokens = build(ModelConfig(dropout=0.0)), torch.arange(6)

    def ask(samples: Sequence[torch.Tensor]) -> Totals:
        with torch.no_grad():
            return Totals(model(torch.stack([*samples])).sum(), len(samples))

    ask([tokens])
    assert is_gathered(model)
    runner_of(model, 2, ask, Recovery(model, enabled=recover)).run([tokens, tokens], step=0)
    assert not is_gathered(model)


# ghost passes: what they compute, and what they cost


def runner_with(inside: Callable[[Tensor], Tensor], rows: int = 4) -> StepRunner[Tensor]:
    """Collective: return a runner of a model under tensor parallelism."""
    [model], train = OnMesh(partial(split_layers, inside)).parts()
    return runner_of(model, rows, train)


def numbered_samples() -> list[Tensor]:
    return [torch.arange(start, start + 8) for start in range(4)]


@on_ranks(2)
def test_tensor_cached_by_a_module_in_a_failing_first_pass_is_recomputed_with_data() -> None:

    def scaled(value: Tensor) -> Tensor:
        if not hasattr(runner.model, "factor"):
            runner.model.factor = torch.linspace(0, 1, value.shape[-1]).sin()
        return value * runner.model.factor

    runner = runner_with(scaled, rows=2)
    runner.run(numbered_samples(), step=0)
    expected = gradients_of(runner.model)
    runner.close()
    runner = runner_with(scaled)
    with FaultInjector(runner).fail_at(rank=1, step=0, operation=2):
        runner.run(numbered_samples(), step=0)
    assert runner.recoveries == 1
    assert gradients_equal(gradients_of(runner.model), expected)


class Stored:
    """A sample in which a stage stores a result."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.reference = value, None


@on_ranks(2)
def test_stage_that_stores_results_in_its_samples_recovers() -> None:
    model = runner_with(torch.sin).model

    def store(stored: Sequence[Stored]) -> Totals:
        with torch.no_grad():
            for each in stored:
                each.reference = model(each.value[None])[0]
        return Totals(torch.zeros(()), 0)

    runner = StepRunner(model, store, limit=RowLimit(4), kind=SampleKind(length_of=lambda _: 1, filler=copy.copy))
    stored = [*map(Stored, numbered_samples())]
    with FaultInjector(runner).fail_at(rank=1, step=0, operation=30):
        runner.run(stored, step=0)
    expected = model(torch.stack([each.value for each in stored]))
    torch.testing.assert_close(torch.stack([each.reference for each in stored]), expected)
    assert runner.recoveries == 1


@on_ranks(2)
def test_runners_may_be_closed_in_any_order() -> None:
    """The second one counts messages until it is closed."""
    stock = dist.ProcessGroup.allreduce
    first, second = (runner_with(torch.sin) for _ in range(2))
    first.close()
    second.run(numbered_samples(), step=0)
    assert dist.ProcessGroup.allreduce is not stock
    second.close()
    assert dist.ProcessGroup.allreduce is stock


@on_ranks(2)
def test_ghost_pass_needs_less_than_a_quarter_of_the_memory_of_a_pass() -> None:
    """In a step whose last operation fails."""
    bench = Bench(replace(SCENARIOS["tensor parallel"], rows=4))
    bench.samples = [torch.arange(64)] * 4
    ghost._SMALL = 64  # elements: scaled down with the model
    runner, drained = bench.new_runner(), []
    bench.disturbed(runner, None)
    meter = MemoryMeter()

    @contextmanager
    def around(kind: str) -> Iterator[None]:
        before = meter.live_bytes
        meter.reset_peak()
        yield
        drained.append((kind, meter.peak_bytes - before))

    with meter, wrapping_passes(runner, around):
        bench.disturbed(runner, 900)
    if dist.get_rank() == 1:
        real_bytes = max(size for kind, size in drained if kind == "microbatch")
        assert 0 < dict(drained[:2])["drain"] < real_bytes / 4


@on_ranks(2)
def test_healthy_steps_run_without_a_dispatch_mode() -> None:
    in_mode = []

    def watched(value: Tensor) -> Tensor:
        in_mode.append(is_in_torch_dispatch_mode())
        return value

    runner = runner_with(watched)
    for step in range(2):
        runner.run(numbered_samples(), step=step)
        runner.model.zero_grad(set_to_none=True)
    assert in_mode == [False, False]
