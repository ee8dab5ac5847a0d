"""Steps recover from out-of-memory errors if ranks exchange activations. `make faults` tries every operation."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tests.distributed.faults.meshes import MESH_CASES, parts_of
from tests.distributed.faults.sweeps import sweep
from tests.distributed.models import gradients_equal, gradients_of, runner_of
from tests.fault_injection import FaultInjector, wrapping_passes
from tests.ranks import RankFailed, run_on_ranks
from torchtune_adaptive.engine import ghost
from torchtune_adaptive.engine.consistency import LATE_S
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.memory import MemoryMeter
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner

CASES = {case.name: case for case in MESH_CASES}
SAMPLED = 4


@pytest.mark.smoke("expert_parallel-checkpointing")
@pytest.mark.parametrize("name", CASES, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def test_gradients_after_a_recovery_are_bitwise_equal_to_an_undisturbed_run(name: str):
    case = CASES[name]
    sampled = SAMPLED // 2 if case.world_size > 3 else SAMPLED
    for outcome in run_on_ranks(case.world_size, sweep, case, sampled, timeout_s=120):
        assert outcome == (sampled, sampled, 0, 0)


class Layer(nn.Module):
    """Two linear layers, each split over two ranks, with `inside` between them."""

    def __init__(self, inside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(8, 16), nn.Linear(16, 8), inside

    def forward(self, value: Tensor) -> Tensor:
        return self.down(self.inside(self.up(value)))


def runner_with(inside: Callable[[Tensor], Tensor], rows: int = 4) -> StepRunner[Tensor]:
    """Collective: return a runner of a model under tensor parallelism."""
    torch.manual_seed(0)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Layer(inside), init_device_mesh("cpu", (2,)), plan)

    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        loss = model(torch.stack([*samples])).square().sum()
        loss.backward()
        return Totals(loss.detach(), len(samples))

    return runner_of(model, rows, forward_backward)


def samples() -> list[Tensor]:
    return [*torch.randn(4, 8, generator=torch.Generator().manual_seed(3))]


def fail_inside(kind: str) -> None:
    """Rank 1 runs out of memory in the second step, before `inside`."""
    runner = runner_with(INSIDE[kind][0])
    runner.run(samples(), step=0)
    runner.model.zero_grad(set_to_none=True)
    with FaultInjector(runner).fail_at(rank=1, step=1, operation=2):
        runner.run(samples(), step=1)


@torch.library.custom_op("torchtune_adaptive_tests::doubled", mutates_args=())
def doubled(value: Tensor) -> Tensor:
    return 2 * value


@torch.library.custom_op("torchtune_adaptive_tests::tripled", mutates_args=())
def tripled(value: Tensor) -> Tensor:
    return 3 * value


torch.library.register_autograd("torchtune_adaptive_tests::doubled", lambda context, gradient: 2 * gradient)
torch.library.register_autograd("torchtune_adaptive_tests::tripled", lambda context, gradient: 3 * gradient)
torch.library.register_fake("torchtune_adaptive_tests::tripled", torch.empty_like)


class Scaled(torch.autograd.Function):
    """Scales by the sum over ranks, and communicates in the backward as well."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        total = value.detach().mean()
        dist.all_reduce(total)
        context.save_for_backward(value, total)
        return value * total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        value, total = context.saved_tensors
        along_total = (gradient * value).sum() / value.numel()
        dist.all_reduce(along_total)
        return gradient * total + along_total


def reduced_if_large(value: Tensor) -> Tensor:
    if value.detach().abs().mean() > 1e-6:
        dist.all_reduce(torch.ones(1))
    return value


def sized_by_values(value: Tensor) -> Tensor:
    return value + 0 * value[value.detach()[:, 0] > 0].sum()


def sized_by_a_count(value: Tensor) -> Tensor:
    dist.all_reduce(count := (value.detach() > 0).sum())
    dist.all_reduce(torch.ones(1 + int(count)))
    return value


def reduced_if_very_large(value: Tensor) -> Tensor:
    if value.detach().square().sum().item() > 5:
        dist.all_reduce(torch.ones(1))
    return value


def sized_at_random(value: Tensor) -> Tensor:
    dist.all_reduce(torch.ones(int(torch.randint(1, 100, ()))))
    return value


def sized_by_rank_0(value: Tensor) -> Tensor:
    dist.broadcast(size := torch.rand(()), 0)
    dist.all_reduce(torch.ones(1 + int(10 * size.item())))
    return value


def to_the_neighbour(value: Tensor) -> Tensor:
    other = 1 - dist.get_rank()
    pairs = [dist.P2POp(dist.isend, torch.ones(2), other), dist.P2POp(dist.irecv, torch.ones(2), other)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    return value


@cache
def group_without_counter() -> dist.ProcessGroup:
    return dist.new_group(backend="fake")


def over_a_group_without_counter(value: Tensor) -> Tensor:
    dist.all_reduce(value.detach().clone(), group=group_without_counter())
    return value


KEPT: list[Tensor] = []


def kept_outside(value: Tensor) -> Tensor:
    KEPT[:] = [value.detach()]
    return value


INSIDE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "no fake implementation": (doubled, "at test_meshes.py:.*torchtune_adaptive_tests::doubled"),
    "a number of collectives that depends on values": (reduced_if_large, "allreduce_.* at test_meshes.py:"),
    "a size that depends on values": (sized_by_values, "index.* at test_meshes.py:"),
    "a size that depends on a count of values": (sized_by_a_count, "allreduce_.* at test_meshes.py:"),
    "a collective that depends on a large value": (reduced_if_very_large, "allreduce_.* at test_meshes.py:"),
    "a random size": (sized_at_random, "allreduce_.* at test_meshes.py:"),
    "a random size from rank 0": (sized_by_rank_0, "allreduce_.* at test_meshes.py:"),
    "messages to one rank": (to_the_neighbour, "c10d::send at test_meshes.py:"),
    "a group without a counter": (over_a_group_without_counter, "test_meshes.py:.*fake, which counts no messages"),
    "a tensor kept outside of modules": (kept_outside, r"keeps a tensor of \[4, 8\]"),
}


@pytest.mark.parametrize("kind", INSIDE)
def test_pass_that_cannot_run_without_data_ends_all_ranks_with_the_reason(kind: str):
    with pytest.raises(RankFailed, match=f"RecoveryUnsupportedError: out of memory on rank 1, .*{INSIDE[kind][1]}"):
        run_on_ranks(2, fail_inside, kind, timeout_s=15)


def communicate_once_too_often_in_a_failed_step() -> None:
    group = dist.new_group()

    def twice_on_rank_0(value: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1), group=group)
        if dist.get_rank() == 0 and runner.current_step == 1:
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
        return value

    runner = runner_with(twice_on_rank_0)
    runner.run(samples(), step=0)
    runner.model.zero_grad(set_to_none=True)
    with FaultInjector(runner).fail_at(rank=1, step=1, operation=2):
        runner.run(samples(), step=1)


def test_ranks_at_different_collectives_of_a_group_end_together() -> None:
    with pytest.raises(RankFailed, match="UnrecoverableError: the ranks issued different numbers of collectives"):
        run_on_ranks(2, communicate_once_too_often_in_a_failed_step, timeout_s=15)


def masked_on_all_ranks(value: Tensor) -> Tensor:
    dist.barrier()
    mask = value.detach().mean(-1) > 0
    masks = torch.empty((2, *mask.shape), dtype=torch.bool)
    dist.all_gather_into_tensor(masks.flatten(), mask)
    return value * masks.all(0).unsqueeze(-1)


EXTENSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "custom autograd function that communicates": Scaled.apply,
    "custom operator with a fake implementation": tripled,
    "computed mask that ranks exchange, and a barrier": masked_on_all_ranks,
}


def recovered_with(extension: str) -> tuple[int, list[bool]]:
    """Collective: let single operations of steps fail on rank 1, and compare the gradients."""
    runner = runner_with(EXTENSIONS[extension], rows=2)
    runner.run(samples(), step=0)
    expected = gradients_of(runner.model)
    runner.use_limit(RowLimit(4))
    fresh, equal = runner.state_dict(), []
    with FaultInjector(runner) as faults:
        for step, operation in enumerate((1, 3, 6, 12, 20), 1):
            runner.model.zero_grad(set_to_none=True)
            runner.load_state_dict(fresh)
            faults.fail_at(rank=1, step=step, operation=operation)
            runner.run(samples(), step=step)
            equal.append(gradients_equal(gradients_of(runner.model), expected))
    return faults.fired, equal


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_custom_code_recovers_with_bitwise_equal_gradients(extension: str):
    assert run_on_ranks(2, recovered_with, extension, timeout_s=30) == [(0, [True] * 5), (5, [True] * 5)]


def gradients_with_a_cache() -> tuple[int, bool]:
    """Collective: fail in the first pass of a layer that caches a tensor in it."""

    def scaled(value: Tensor) -> Tensor:
        if not hasattr(runner.model, "factor"):
            runner.model.factor = torch.linspace(0, 1, 8).sin()
        return value * runner.model.factor

    runner = runner_with(scaled, rows=2)
    runner.run(samples(), step=0)
    expected = gradients_of(runner.model)
    runner.close()
    runner = runner_with(scaled)
    with FaultInjector(runner).fail_at(rank=1, step=0, operation=2):
        runner.run(samples(), step=0)
    return runner.recoveries, gradients_equal(gradients_of(runner.model), expected)


def test_tensor_cached_by_a_module_is_recomputed_with_data():
    assert run_on_ranks(2, gradients_with_a_cache, timeout_s=20) == [(1, True)] * 2


def in_compiled_layers() -> tuple[int, bool]:
    """Collective: fail in the second step, in a layer that was compiled with its collectives."""
    runner = runner_with(torch.sin, rows=2)
    runner.model.compile(backend="aot_eager", fullgraph=True)
    runner.run(samples(), step=0)
    expected = gradients_of(runner.model)
    runner.model.zero_grad(set_to_none=True)
    runner.use_limit(RowLimit(4))
    with FaultInjector(runner).fail_at(rank=1, step=1, operation=2):
        runner.run(samples(), step=1)
    return runner.recoveries, gradients_equal(gradients_of(runner.model), expected)


def test_compiled_layers_recover():
    assert run_on_ranks(2, in_compiled_layers, timeout_s=30) == [(1, True)] * 2


def gathered_twice(value: Tensor) -> Tensor:
    """A compiler gathers once."""
    first, second = (functional.all_gather_tensor_autograd(value, 0, dist.group.WORLD) for _ in range(2))
    return value * (first + second).mean()


def fail_in_compiled_layers_that_gather_twice(steps_before: int) -> None:
    runner = runner_with(gathered_twice)
    runner.model.compile(backend="aot_eager", fullgraph=True)
    for step in range(steps_before):
        runner.run(samples(), step=step)
        runner.model.zero_grad(set_to_none=True)
    with FaultInjector(runner).fail_at(rank=1, step=steps_before, operation=2):
        runner.run(samples(), step=steps_before)


@pytest.mark.parametrize(("steps_before", "times"), [(0, "an unknown number of"), (1, r"\d+")])
def test_compiled_code_with_other_collectives_than_eager_code_ends_all_ranks(steps_before: int, times: str) -> None:
    message = rf"it is compiled, and communicates \d+ times in eager mode, but {times} times in compiled code"
    with pytest.raises(RankFailed, match=f"RecoveryUnsupportedError: out of memory on rank 1, .*{message}"):
        run_on_ranks(2, fail_in_compiled_layers_that_gather_twice, steps_before, timeout_s=30)


class Stored:
    """A sample in which a stage stores a result."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.reference = value, None


def recover_in_a_stage_that_stores_results() -> int:
    model = runner_with(torch.sin).model

    def store(stored: Sequence[Stored]) -> Totals:
        with torch.no_grad():
            for each in stored:
                each.reference = model(each.value[None])[0]
        return Totals(torch.zeros(()), 0)

    runner = StepRunner(model, store, limit=RowLimit(4), kind=SampleKind(length_of=lambda _: 1, filler=copy.copy))
    stored = [*map(Stored, samples())]
    with FaultInjector(runner).fail_at(rank=1, step=0, operation=30):
        runner.run(stored, step=0)
    expected = model(torch.stack([each.value for each in stored]))
    torch.testing.assert_close(torch.stack([each.reference for each in stored]), expected)
    return runner.recoveries


def test_stage_that_stores_results_in_its_samples_recovers() -> None:
    assert run_on_ranks(2, recover_in_a_stage_that_stores_results, timeout_s=20) == [1, 1]


def close_the_first_of_two() -> int:
    first, second = (runner_with(torch.sin) for _ in range(2))
    first.close()
    second.run(samples(), step=0)
    patched = dist.ProcessGroup.allreduce
    second.close()
    return patched is not dist.ProcessGroup.allreduce


def test_runners_may_be_closed_in_any_order() -> None:
    stock = dist.ProcessGroup.allreduce
    assert run_on_ranks(2, close_the_first_of_two, timeout_s=20) == [True, True]
    assert dist.ProcessGroup.allreduce is stock


def change_a_step_with_a_late_replica() -> int:
    """Replicas take part in no common collective before the last microbatch."""
    [model], train = parts_of(CASES["tensor parallel and replicas"])
    runner, trained = runner_of(model, 2, train), 0
    for step, count in enumerate((4, 3)):
        if step and dist.get_rank() > 1:
            time.sleep(2 * LATE_S)
        trained += runner.run([torch.arange(8)] * count, step=step).target_tokens
        model.zero_grad(set_to_none=True)
    return trained


def test_late_replica_does_not_end_a_step_with_another_number_of_samples() -> None:
    assert run_on_ranks(4, change_a_step_with_a_late_replica, timeout_s=30) == [4 * 7 * 7] * 4


def test_ghost_pass_counts_with_integers_and_masks_as_a_pass_does():
    weights, choices, counts = torch.ones(3, 4), torch.tensor([[0], [0], [2]]), []

    def run() -> None:
        chosen = torch.zeros_like(weights.sin(), dtype=torch.bool).scatter_(-1, choices, True)
        counts.append(torch.ones(4, dtype=torch.long).add_(chosen.sum(0)).tolist())

    run()
    ghost.GhostMode([], made_up=0).run(run)
    assert counts == [[3, 1, 2, 1]] * 2


def peaks() -> tuple[int, int]:
    """Collective: return the peaks of the ghost pass and of a microbatch, in a step whose last operation fails."""
    bench = replace(CASES["tensor parallel"], rows=4).bench()
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
    kinds = dict(drained[:2])
    return kinds.get("drain", 0), max(size for kind, size in drained if kind == "microbatch")


def test_ghost_pass_needs_less_than_a_quarter_of_the_memory_of_a_pass():
    _, (ghost_bytes, real_bytes) = run_on_ranks(2, peaks, timeout_s=30)
    assert 0 < ghost_bytes < real_bytes / 4


def modes_in_healthy_steps() -> list[bool]:
    in_mode = []

    def watched(value: Tensor) -> Tensor:
        in_mode.append(is_in_torch_dispatch_mode())
        return value

    runner = runner_with(watched)
    for step in range(2):
        runner.run(samples(), step=step)
        runner.model.zero_grad(set_to_none=True)
    return in_mode


def test_healthy_steps_run_without_a_dispatch_mode():
    assert run_on_ranks(2, modes_in_healthy_steps, timeout_s=20) == [[False, False]] * 2
