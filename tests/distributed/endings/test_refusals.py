"""What the engine cannot do ends every rank promptly, with the same error on all of them."""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.faults.meshes import OnMesh, split_layers, tensor_parallel
from tests.distributed.models import ModelConfig, batch_of, build, forward_backward_of, runner_of, samples_of
from tests.fault_injection import FaultInjector
from tests.ranks import RankFailed, on_ranks, run_on_ranks
from tests.searched_model import Shape, Trained, search_within
from torchtune_adaptive.engine import snapshot
from torchtune_adaptive.engine.fsdp import why_recovery_is_off
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import (
    AdaptiveError,
    CollectiveFailedError,
    LimitExhaustedError,
    RecoveryUnsupportedError,
    Remedy,
    UnrecoverableError,
)


class Refusal(NamedTuple):
    """What a rank raised."""

    kind: type
    text: str
    remedies: tuple[Remedy, ...]


def refusal_of(function: Callable[[], object]) -> Refusal | None:
    """Collective."""
    try:
        function()
    except (AdaptiveError, ValueError) as error:
        return Refusal(type(error), str(error), getattr(error, "remedies", ()))
    return None


def run_steps(runner: StepRunner[Tensor], *, steps: int = 1, samples: int = 2) -> None:
    """Collective."""
    for step in range(steps):
        runner.run(samples_of(dist.get_rank(), samples), step=step)
        runner.model.zero_grad(set_to_none=True)


def fail(runner: StepRunner[Tensor], *, step: int = 1, operation: int = 2, times: int = 1) -> None:
    """Collective: run out of memory on rank 1 in this step."""
    with FaultInjector(runner).fail_at(rank=1, step=step, operation=operation, times=times):
        run_steps(runner, steps=step + 1)


# one row, or the collectives that peers expect, do not fit


def one_row_does_not_fit() -> None:
    fail(runner_of(build(ModelConfig()), 2), times=3)


def no_memory_to_drain() -> None:
    runner = runner_of(build(ModelConfig()), 2)
    with FaultInjector(runner).fail_at(rank=1, step=0, operation=300).fail_in_drain(rank=1, step=0, times=1000):
        run_steps(runner)


# ranks that differ


def one_collective_too_many() -> None:
    def miscounting(samples):
        runner.recovery.ledger.position += dist.get_rank()
        return train(samples)

    train = forward_backward_of(model := build(ModelConfig()))
    run_steps(runner := runner_of(model, 2, miscounting))


def a_step_skipped_on_one_rank() -> None:
    def reading(samples):
        if runner.current_step == 2 and dist.get_rank() == 1:
            raise KeyError("a bad sample")
        return train(samples)

    train = forward_backward_of(model := build(ModelConfig()))
    runner = runner_of(model, 2, reading)
    for step in 1, 2, 3:
        try:
            runner.run(samples_of(dist.get_rank(), 2), step=step)
        except KeyError:
            continue
        model.zero_grad()


def other_numbers_of_samples(
    first: list[int], second: list[int], limits: tuple[Limit, Limit], replicas: int = 1
) -> None:
    """Train with these numbers of samples in each step of a rank, `second` on every second rank."""
    place = dist.get_rank() % 2
    runner = runner_of(build(ModelConfig(dropout=0.0, replicas=replicas)), limits[place])
    for step, count in enumerate((first, second)[place]):
        runner.run(samples_of(dist.get_rank(), count), step=step)
        runner.model.zero_grad()


def other_numbers_in_tensor_parallelism(samples: tuple[int, int], limits: tuple[int, int]) -> None:
    """This is checked before the first collective, because collectives of different sizes crash gloo."""
    rank = dist.get_rank()
    [model], train = OnMesh(tensor_parallel).parts()
    runner_of(model, limits[rank], train).run([torch.ones(8, dtype=torch.int64)] * samples[rank], step=1)


def other_sums(names: str, dtype: torch.dtype = torch.float32) -> None:
    def with_sums(samples):
        own, kind = ("a", torch.float32) if dist.get_rank() == 0 else (names, dtype)
        return train(samples)._replace(sums=dict.fromkeys(own, torch.ones((), dtype=kind)))

    train = forward_backward_of(model := build(ModelConfig()))
    run_steps(runner_of(model, 2, with_sums))


def another_trained_model() -> None:
    """Run out of memory in the model of another stage, which is not reset for this one."""
    own, other = build(ModelConfig(dropout=0.0)), build(ModelConfig(dropout=0.0))

    def with_other(samples):
        with torch.no_grad():
            other(batch_of(samples)[0])
        return train(samples)

    train = forward_backward_of(own)
    fail(runner_of(own, 2, with_other, Recovery(own, other), "policy"), step=0, operation=60)


def other_collectives_of_a_group() -> None:
    group = dist.new_group()

    def twice_on_rank_0(value: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1), group=group)
        if dist.get_rank() == 0 and runner.current_step == 1:
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
        return value

    fail(runner := with_inside(twice_on_rank_0))


def fill_weights(model: nn.Module, value: int) -> None:
    for parameter in model.parameters():
        getattr(parameter, "_local_tensor", parameter).data.fill_(value)


def other_weights(config: str) -> None:
    fill_weights(model := build(REPLICAS[config]), dist.get_rank() // 2)
    run_steps(runner_of(model, 4))


def another_frozen_model(differs: bool) -> None:
    """Each model is compared among its own replicas: here shards in nodes, and one replica per rank."""
    model, frozen = build(REPLICAS["shards in nodes"]), build(REPLICAS["replicated"])
    fill_weights(frozen, int(differs and dist.get_rank() == 3))
    run_steps(runner_of(model, 4, recovery=Recovery(model, frozen)))


REPLICAS = {
    "shards in nodes": ModelConfig(replicas=2),
    "replicated": ModelConfig(replicated=True),
    "whole": ModelConfig(sharded=False),
}


# models and loops that cannot be repeated


def other_collectives_than_before() -> None:
    runner = runner_of(build(ModelConfig()), 2)
    run_steps(runner)
    runner.model.set_reshard_after_forward(False)
    runner.run(samples_of(dist.get_rank(), 2), step=1)
    runner.model.zero_grad()
    fail(runner, step=2)


def sharded_after_its_runner() -> None:
    runner = runner_of(build(ModelConfig(sharded=False)), 2)
    fully_shard(runner.model)
    run_steps(runner)


def parameters_kept_gathered() -> None:
    model = build(ModelConfig())
    model.set_reshard_after_backward(False)
    runner_of(model, 2)


def gradients_without_reduction(of_this_runner: bool) -> None:
    runner = runner_of(model := build(ModelConfig()), 2)
    model.set_requires_gradient_sync(False)
    if not of_this_runner:
        forward_backward_of(model)(samples_of(dist.get_rank(), 2))
        model.set_requires_gradient_sync(True)
    run_steps(runner)


def deferred_reduction(operation: int) -> None:
    """A loop that reduce-scatters gradients only in the last microbatch of a step."""

    def accumulating(samples):
        model.set_requires_gradient_sync(next(numbers))
        return train(samples)

    train = forward_backward_of(model := build(ModelConfig()))
    numbers = iter([False, True, False, True])
    runner = runner_of(model, 2, accumulating)
    with FaultInjector(runner).fail_at(rank=1, step=0, operation=operation):
        run_steps(runner, samples=4)


def lose_a_peer(trained: ModelConfig | OnMesh) -> None:
    [model], train = trained.parts()
    runner = runner_of(model, 2, train)
    samples = samples_of(0, 2)
    runner.run(samples, step=0)
    model.zero_grad()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    try:
        runner.run(samples, step=1)
    finally:
        dist.destroy_process_group()


def changed_by_a_search(case: str) -> None:
    """Search with a condition on the last rank that a search does not allow."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with MemoryMeter() as meter:
        trained = Trained(Shape(), torch.optim.Rprop if case == "full" else torch.optim.AdamW)
        update = trained.update

        def clamping(result: Any) -> None:
            update(result)
            if is_last and case == "clamps":
                next(trained.model.parameters()).data.clamp_(-1e-3, 1e-3)

        trained.update = clamping
        if is_last and case == "full":
            snapshot.free_host_bytes = lambda: 1000
        search_within(trained.step(), meter, 400_000)


# code in a model that cannot run without data


@torch.library.custom_op("torchtune_adaptive_tests::doubled", mutates_args=())
def operator(value: Tensor) -> Tensor:
    return 2 * value


def doubled(value: Tensor) -> Tensor:
    return operator(value)


torch.library.register_autograd("torchtune_adaptive_tests::doubled", lambda context, gradient: 2 * gradient)


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


def gathered_twice(value: Tensor) -> Tensor:
    """A compiler gathers once."""
    first, second = (functional.all_gather_tensor_autograd(value, 0, dist.group.WORLD) for _ in range(2))
    return value * (first + second).mean()


def with_inside(inside: Callable[[Tensor], Tensor]) -> StepRunner[Tensor]:
    """Collective: return a runner of a model under tensor parallelism that calls `inside`."""
    [model], train = OnMesh(partial(split_layers, inside)).parts()
    return runner_of(model, 4, lambda samples: train([torch.arange(8)] * len(samples)))


def inside_of(inside: Callable[[Tensor], Tensor]) -> None:
    fail(with_inside(inside))


def compiled_otherwise(step: int) -> None:
    runner = with_inside(gathered_twice)
    runner.model.compile(backend="aot_eager", fullgraph=True)
    fail(runner, step=step)


INSIDE = {
    doubled: "torchtune_adaptive_tests::doubled",
    reduced_if_large: "allreduce_",
    sized_by_values: "index",
    sized_by_a_count: "allreduce_",
    sized_at_random: "allreduce_",
    sized_by_rank_0: "allreduce_",
    to_the_neighbour: "c10d::send",
    over_a_group_without_counter: "fake",
    kept_outside: "8, 8]",
}
"""Code, and what the error names."""


def case(kind: type, function: Callable[..., object], *args: Any, ranks: int = 2, names: Sequence[str] = ()) -> Any:
    parts = [getattr(each, "__name__", str(each)) for each in (function, *args)]
    return pytest.param(partial(function, *args), ranks, kind, names, id=" ".join(parts))


FULL, DIFFERENT, UNSUPPORTED = LimitExhaustedError, UnrecoverableError, RecoveryUnsupportedError
ROWS, NODES = (RowLimit(2), RowLimit(2)), ("rank 2", "rank 0")
DEFERRED = ("set_requires_gradient_sync(False)",)
REFUSED = [
    case(FULL, one_row_does_not_fit, names=("rank 1", "step 1", Remedy.CHECKPOINT_ACTIVATIONS.value)),
    case(DIFFERENT, one_collective_too_many),
    case(DIFFERENT, a_step_skipped_on_one_rank, names=("[2, 3]",)),
    case(DIFFERENT, other_numbers_in_tensor_parallelism, (8, 7), (8, 8), names=("8 samples", "7 samples")),
    case(DIFFERENT, other_numbers_in_tensor_parallelism, (8, 8), (8, 4), names=("8 samples", "2 microbatches")),
    case(DIFFERENT, other_sums, "b", names=("other names in sums",)),
    case(DIFFERENT, other_sums, "ab", names=("other names in sums",)),
    case(DIFFERENT, other_sums, "a", torch.float64, names=("another type",)),
    *(case(DIFFERENT, other_weights, config, ranks=4, names=NODES) for config in REPLICAS),
    case(DIFFERENT, another_frozen_model, True, ranks=4, names=("rank 3", "rank 0")),
    case(DIFFERENT, changed_by_a_search, "full", names=("1000 B",)),
    case(DIFFERENT, changed_by_a_search, "clamps", names=("rank 1",)),
    case(UNSUPPORTED, parameters_kept_gathered, names=("set_reshard_after_backward(False)",)),
    case(ValueError, sharded_after_its_runner),
    *(case(ValueError, gradients_without_reduction, own, names=DEFERRED) for own in (False, True)),
]
ENDED = [
    case(DIFFERENT, no_memory_to_drain, names=("rank 1", Remedy.MORE_RANKS.value)),
    case(DIFFERENT, other_numbers_of_samples, [8], [6], ROWS, names=("4 ", "3 ")),
    case(DIFFERENT, other_numbers_of_samples, [8, 8], [8, 6], ROWS, names=("3 ",)),
    case(DIFFERENT, other_numbers_of_samples, [8, 10], [8, 8], ROWS, names=("5 ",)),
    case(DIFFERENT, other_numbers_of_samples, [8], [6], ROWS, 2, ranks=4, names=("4 ", "3 ")),
    case(DIFFERENT, other_numbers_of_samples, [8], [8], (RowLimit(2), RowLimit(4)), names=("4 ", "2 ")),
    case(DIFFERENT, other_numbers_of_samples, [8], [8], (RowLimit(2), TokenLimit(16)), names=("4 ",)),
    case(UNSUPPORTED, another_trained_model, names=("another stage trains",)),
    case(DIFFERENT, other_collectives_of_a_group),
    case(UNSUPPORTED, other_collectives_than_before),
    *(case(UNSUPPORTED, deferred_reduction, operation, names=DEFERRED) for operation in (20, 200)),
    *(case(UNSUPPORTED, inside_of, function, names=("rank 1", named)) for function, named in INSIDE.items()),
    *(case(UNSUPPORTED, compiled_otherwise, step, names=("rank 1",)) for step in (0, 1)),
]
"""The rank that knows ends all others, which lose their peer."""


@pytest.mark.smoke("one_row_does_not_fit")
@pytest.mark.parametrize(("function", "ranks", "kind", "names"), REFUSED)
def test_all_ranks_end_with_the_same_error(
    function: Callable[[], object], ranks: int, kind: type, names: Sequence[str]
) -> None:
    first, *others = run_on_ranks(ranks, refusal_of, function, timeout_s=30)  # a silent rank would take longer
    assert others == [first] * (ranks - 1)
    assert first is not None
    assert issubclass(first.kind, kind), first
    assert all(name in first.text for name in names), first


@pytest.mark.smoke("inside_of reduced_if_large")
@pytest.mark.parametrize(("function", "ranks", "kind", "names"), ENDED)
def test_rank_that_cannot_continue_ends_all_ranks_with_the_reason(
    function: Callable[[], object], ranks: int, kind: type, names: Sequence[str]
) -> None:
    with pytest.raises(RankFailed) as ended:
        run_on_ranks(ranks, function, timeout_s=30)  # a silent rank would take longer
    [message, *_] = re.findall(rf"^torchtune_adaptive\.errors\.{kind.__name__}: (.*)", str(ended.value), re.MULTILINE)
    assert all(name in message for name in names), message
    if function.func is inside_of and function.args[0] is not kept_outside:
        assert f"{Path(__file__).name}:" in message


@pytest.mark.parametrize("model", [ModelConfig(), OnMesh(tensor_parallel)], ids=["FSDP", "tensor parallel"])
def test_exited_peer_is_an_error_of_the_collective(model: ModelConfig | OnMesh) -> None:
    first, second = run_on_ranks(2, refusal_of, partial(lose_a_peer, model))
    assert (first.kind, second) == (CollectiveFailedError, None)


def without_differences() -> None:
    other_numbers_of_samples([8, 8, 4, 8], [8, 8, 4, 8], ROWS)
    changed_by_a_search("usual")


@pytest.mark.parametrize(("function", "ranks"), [(without_differences, 2), (partial(another_frozen_model, False), 4)])
def test_equal_ranks_are_not_refused(function: Callable[[], object], ranks: int) -> None:
    assert run_on_ranks(ranks, refusal_of, function) == [None] * ranks


@on_ranks(2)
def test_unsupported_models_are_refused_with_a_reason() -> None:
    def linear() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4))

    flat = init_device_mesh("cpu", (2,))
    two_dimensional = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    hooked = fully_shard(linear(), mesh=flat)
    hooked[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    reduced = fully_shard(linear(), mesh=flat)
    reduced.set_all_reduce_hook(lambda gradient: None)
    symmetric = fully_shard(linear(), mesh=flat)
    symmetric.set_symm_mem_for_comm()
    inner_only = linear()
    fully_shard(inner_only[0], mesh=flat)
    with pytest.raises(RecoveryUnsupportedError):
        Recovery(inner_only)
    inner, outer = two_dimensional["b"], two_dimensional["a"]
    models = {
        "": fully_shard(linear(), mesh=flat),
        " hybrid": fully_shard(linear(), mesh=two_dimensional),
        " replicated": replicate(linear()),
        " whole": linear(),
        " tensor parallel": distribute_module(linear(), flat),
        " tensor parallel inside": fully_shard(distribute_module(linear(), inner), mesh=outer),
        "some of the ranks": fully_shard(linear(), mesh=outer),
        "some of the ranks under tensor parallelism": distribute_module(linear(), outer),
        "`module`": DistributedDataParallel(linear()),
        "root": inner_only,
        "an optimizer in the backward": hooked,
        "all-reduce hook": reduced,
        "set_symm_mem_for_comm": symmetric,
    }
    for name, model in models.items():
        reason = why_recovery_is_off(model)
        assert (reason is None) == (name == "" or name.startswith(" ")), name
        assert reason is None or name == "root" or name.removesuffix(" under tensor parallelism") in reason
