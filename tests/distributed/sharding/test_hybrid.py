"""Hybrid sharding (shards within a node, replicas across nodes) in loops without torchtune."""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed import models
from tests.distributed.count_collectives import ALL_REDUCE, CountCollectives
from tests.distributed.faults.fault_variants import over_ranks
from tests.distributed.models import mesh_of, samples_of
from tests.fault_injection import FaultInjector, wrapping_passes
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.consistency import LATE_S
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import UnrecoverableError

SAMPLES = 8


def plain_model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(64, 32), *blocks, nn.Linear(32, 64))


def sharded_in_nodes(model: nn.Module) -> nn.Module:
    for module in (*model, model):
        fully_shard(module, mesh=mesh_of(2))
    return model


def replicated(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
    for module in (*model, model):
        replicate(module, mesh=mesh)
    return model


def loss_of(model: nn.Module, samples: Sequence[Tensor]) -> Tensor:
    tokens = nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
    labels = nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=-100)[:, 1:]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten(), reduction="sum")


def runner_of(model: nn.Module, rows: int = 4) -> StepRunner[Tensor]:
    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        loss = loss_of(model, samples)
        loss.backward()
        return Totals(loss.detach(), sum(map(len, samples)))

    return models.runner_of(model, rows, forward_backward)


def whole_gradients(model: nn.Module) -> Tensor:
    """Collective."""
    found = [parameter.grad for parameter in model.parameters()]
    return torch.cat([(each.full_tensor() if isinstance(each, DTensor) else each).flatten() for each in found])


@cache
def gradients_of_one_process() -> Tensor:
    """Compute the gradients of all ranks' samples in one process, averaged over ranks like FSDP."""
    model = plain_model()
    for rank in range(dist.get_world_size()):
        for sample in samples_of(rank, SAMPLES):
            (loss_of(model, [sample]) / dist.get_world_size()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def run_out(runner: StepRunner[Tensor], operation: int, *, step: int = 1, failing: int = 1) -> None:
    """Collective: fail in this step and check that its gradients are those of one process."""
    expected = gradients_of_one_process()
    with FaultInjector(runner).fail_at(rank=failing, step=step, operation=operation) as faults:
        result = runner.run(samples_of(dist.get_rank(), SAMPLES), step=step)
    assert (over_ranks(faults.fired), result.recoveries) == (1, 1)
    error = (whole_gradients(runner.model) - expected).abs().max() / expected.abs().max()
    assert error.item() < 1e-5


def recover_with_replicas() -> None:
    for rows, failing, operation in itertools.product((4, 8), (1, 2), (3, 40, 90, 140, 170)):
        runner = runner_of(replicated(plain_model()), rows)
        run_out(runner, operation, failing=failing)
        runner.close()


def test_loop_with_replicas_recovers_the_gradients_of_one_process():
    """tests/distributed/faults and test_fsdp_options.py test hybrid sharding."""
    run_on_ranks(4, recover_with_replicas, timeout_s=60)


def sums_over_replicas(rows: int) -> int:
    runner = runner_of(sharded_in_nodes(plain_model()), rows)
    runner.run(samples_of(dist.get_rank(), SAMPLES), step=0)  # the first step also compares replicas
    runner.model.zero_grad()
    with CountCollectives() as counted:
        runner.run(samples_of(dist.get_rank(), SAMPLES), step=1)
    return counted.seen[ALL_REDUCE]


def test_replicas_reduce_gradients_once_per_step():
    [whole, *_], [split, *_] = (run_on_ranks(4, sums_over_replicas, rows) for rows in (SAMPLES, 1))
    assert split == whole > 1  # one of them is the agreement


def refusal_of(runner: StepRunner[Tensor]) -> str:
    """Collective: return the error of the first step, or an empty string."""
    try:
        runner.run(samples_of(dist.get_rank(), 2), step=1)
    except UnrecoverableError as error:
        return str(error)
    return ""


def step_of_unlike_replicas(spread: Callable[[nn.Module], nn.Module]) -> str:
    return refusal_of(runner_of(spread(plain_model(seed=dist.get_rank() // 2))))


@pytest.mark.parametrize("spread", [sharded_in_nodes, replicated])
def test_replicas_with_different_weights_are_refused_on_all_ranks(spread: Callable):
    messages = run_on_ranks(4, step_of_unlike_replicas, spread)
    assert messages == messages[:1] * 4
    assert messages[0].startswith("the weights on rank 2 differ from those on rank 0, which holds the same shard")


def step_with_another_mesh(alike: bool) -> str:
    """Use a hybrid-sharded policy and a frozen model with one replica per rank."""
    frozen = replicated(plain_model(seed=1 if alike else dist.get_rank() // 3))
    policy = sharded_in_nodes(plain_model())
    return refusal_of(models.runner_of(policy, 4, recovery=Recovery(policy, frozen)))


def test_each_model_is_compared_among_its_replicas():
    assert run_on_ranks(4, step_with_another_mesh, True) == [""] * 4
    for message in run_on_ranks(4, step_with_another_mesh, False):
        assert message.startswith("the weights on rank 3 differ from those on rank 0, which holds the same shard")


def run_late(count: int) -> int:
    """Collective: run two steps in which the last rank is late; the second step has fewer samples.

    Only its node waits for it in the first of two microbatches.
    """
    runner = runner_of(sharded_in_nodes(plain_model()), rows=2)
    for step, samples in enumerate((SAMPLES, count)):
        time.sleep(LATE_S + 1 if dist.get_rank() == 3 else 0)
        runner.run(samples_of(dist.get_rank(), samples), step=step)
        runner.model.zero_grad()
    return runner.recoveries


def test_late_node_is_not_mistaken_for_one_with_different_samples() -> None:
    assert run_on_ranks(4, run_late, SAMPLES // 2) == [0] * 4


def break_off(spread: Callable[[nn.Module], nn.Module], microbatch: int) -> StepRunner[Tensor]:
    """Collective: return a runner after user code raised an error on all ranks in one of four microbatches."""
    runner, begun = runner_of(spread(plain_model()), rows=2), itertools.count()

    def broken(inside: str):
        if next(begun) == microbatch:
            raise KeyError("not a number")
        return nullcontext()

    with wrapping_passes(runner, broken), pytest.raises(KeyError):
        runner.run(samples_of(dist.get_rank(), SAMPLES), step=1)
    return runner


def backward_of_the_user(runner: StepRunner[Tensor]) -> None:
    loss_of(runner.model, samples_of(dist.get_rank(), SAMPLES)).backward()


def use_the_model_after_the_runner(runner: StepRunner[Tensor]) -> None:
    runner.close()
    backward_of_the_user(runner)


def use_the_model_during_the_runner(runner: StepRunner[Tensor]) -> None:
    runner.model.zero_grad()
    backward_of_the_user(runner)


def use_the_runner_after_that(runner: StepRunner[Tensor]) -> None:
    runner.run(samples_of(dist.get_rank(), SAMPLES), step=2)


def next_gradients(spread: Callable[[nn.Module], nn.Module], next_use: Callable[[StepRunner[Tensor]], None]) -> float:
    """Collective: return the largest gradient error after an aborted step, or without one."""
    expected, worst = gradients_of_one_process(), 0.0
    for microbatch in (None, 0, 2, 3):
        runner = runner_of(spread(plain_model())) if microbatch is None else break_off(spread, microbatch)
        next_use(runner)
        worst = max(worst, (whole_gradients(runner.model) - expected).abs().max().item())
    return worst


USES = (use_the_model_after_the_runner, use_the_model_during_the_runner, use_the_runner_after_that)


@pytest.mark.smoke("sharded_in_nodes-use_the_runner_after_that")
@pytest.mark.parametrize("next_use", USES)
@pytest.mark.parametrize("spread", [sharded_in_nodes, replicated])
def test_aborted_step_does_not_change_the_next_gradients(spread: Callable, next_use: Callable):
    assert max(run_on_ranks(4, next_gradients, spread, next_use)) < 1e-3


class SometimesTwoHeads(nn.Module):
    """A model whose second head is used only by long samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = plain_model(), nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.body(tokens)
        return self.head(found) if tokens.shape[1] > 8 else found


def use_a_head_in_all_but_the_last() -> str | float:
    """Collective: return the error message of the run, or the largest gradient error."""
    samples = [torch.arange(1, 20) + dist.get_rank(), torch.arange(1, 6)]
    torch.manual_seed(1)
    model, alone = SometimesTwoHeads(), SometimesTwoHeads()
    alone.load_state_dict(model.state_dict())
    for module in (model.body, model.head, model):
        fully_shard(module, mesh=mesh_of(2))
    try:
        runner_of(model, rows=1).run(samples, step=1)
    except UnrecoverableError as error:
        return str(error)
    for rank in range(4):
        for sample in (torch.arange(1, 20) + rank, torch.arange(1, 6)):
            (loss_of(alone, [sample]) / 4).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in alone.parameters()])
    return (whole_gradients(model) - expected).abs().max().item()


def test_gradients_missing_from_the_last_microbatch_are_reduced_or_end_the_run():
    """torch 2.15 and later reduce them; earlier versions would silently lose them."""
    outcomes = run_on_ranks(4, use_a_head_in_all_but_the_last)
    if isinstance(outcomes[0], float):
        assert max(outcomes) < 1e-3
        return
    assert outcomes == outcomes[:1] * 4
    assert outcomes[0].startswith("head: an earlier microbatch of this step produced gradients, but the last one")
