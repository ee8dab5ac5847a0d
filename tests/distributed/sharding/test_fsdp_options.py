"""Options of FSDP other than `fully_shard(module)`: supported, or refused before a rank waits."""

from collections.abc import Sequence

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.distributed import models
from tests.distributed.models import mesh_of, samples_of
from tests.distributed.sharding.test_hybrid import (
    SAMPLES,
    loss_of,
    plain_model,
    run_out,
    runner_of,
    whole_gradients,
)
from tests.fault_injection import FaultInjector
from tests.ranks import RankFailed, run_on_ranks
from torchtune_adaptive.engine.fsdp import exchanges_activations
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.errors import RecoveryUnsupportedError


def sharded(model: nn.Module, replicas: int = 1) -> nn.Module:
    for module in (*model, model):
        fully_shard(module, mesh=mesh_of(replicas))
    return model


def grouped(model: nn.Module, replicas: int = 1) -> nn.Module:
    """Shard the last block and the head as one group, as torchtitan does with norm and output."""
    *first, block, head = model
    for module in first:
        fully_shard(module, mesh=mesh_of(replicas))
    fully_shard([block, head], mesh=mesh_of(replicas))
    return fully_shard(model, mesh=mesh_of(replicas))


def recover(replicas: int) -> None:
    for operation in (3, 60, 140):
        runner = runner_of(grouped(plain_model(), replicas))
        run_out(runner, operation)
        runner.close()


@pytest.mark.smoke("2")
@pytest.mark.parametrize("replicas", [1, 2])
def test_modules_sharded_as_one_group_recover(replicas: int) -> None:
    run_on_ranks(2 * replicas, recover, replicas)


def exchange_with_weights_loaded_after_sharding() -> bool:
    """Replace the parameters of a sharded model by others, as transformers does when it loads weights."""
    model = sharded(plain_model())
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return exchanges_activations(model)


def test_weights_loaded_after_sharding_are_still_those_of_fsdp() -> None:
    assert run_on_ranks(2, exchange_with_weights_loaded_after_sharding) == [False, False]


def unfreeze() -> None:
    """Freeze the first block in step 1, train it in step 2, and fail in step 2."""
    model = sharded(plain_model())
    model[1].requires_grad_(False)
    runner = runner_of(model)
    runner.run(samples_of(dist.get_rank(), SAMPLES), step=1)
    model[1].requires_grad_(True)
    model.zero_grad(set_to_none=True)
    run_out(runner, 60, step=2)


def test_layers_may_be_unfrozen_between_steps() -> None:
    run_on_ranks(2, unfreeze)


class Accumulating:
    """A loop that reduce-scatters gradients only in the last microbatch of a step."""

    def __init__(self) -> None:
        self.model = sharded(plain_model())
        self.number = self.microbatches = 0
        self.raises_in: int | None = None
        recovery = Recovery(self.model, on_attempt=self.begin)
        self.runner = models.runner_of(self.model, 2, self.forward_backward, recovery)

    def begin(self, stage: str, step: int, plan: Sequence[object]) -> None:
        self.number, self.microbatches = 0, len(plan)

    def forward_backward(self, samples: Sequence[Tensor]) -> Totals:
        assert isinstance(self.model, FSDPModule)
        self.number += 1
        self.model.set_requires_gradient_sync(self.number == self.microbatches)
        if self.number == self.raises_in:
            raise ValueError("a loss that is no number")
        loss = loss_of(self.model, samples)
        loss.backward()
        return Totals(loss.detach(), sum(map(len, samples)))

    def step(self, number: int) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        self.runner.run(samples_of(dist.get_rank(), SAMPLES), step=number)
        return whole_gradients(self.model)


def skip_a_step() -> float:
    loop = Accumulating()
    expected = loop.step(1)
    loop.raises_in = 2
    with pytest.raises(ValueError, match="no number"):
        loop.step(2)
    loop.raises_in = None
    return ((loop.step(3) - expected).abs().max() / expected.abs().max()).item()


def test_skipped_step_does_not_change_the_next_gradients() -> None:
    assert max(run_on_ranks(2, skip_a_step)) < 1e-6


def run_out_while_accumulating(operation: int) -> None:
    with FaultInjector((loop := Accumulating()).runner).fail_at(rank=1, step=1, operation=operation):
        loop.step(1)


@pytest.mark.parametrize("operation", [20, 200])
def test_oom_before_deferred_reduce_scatter_ends_the_run_with_a_reason(operation: int) -> None:
    with pytest.raises(
        RankFailed, match=r"microbatches issue different collectives \(set_requires_gradient_sync\(False\)"
    ):
        run_on_ranks(2, run_out_while_accumulating, operation, timeout_s=60)


def keep_parameters() -> None:
    model = sharded(plain_model())
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)
    with pytest.raises(RecoveryUnsupportedError, match=r"backward\(False\) keeps parameters gathered for the next"):
        runner_of(model)


def test_parameters_kept_gathered_across_microbatches_are_refused() -> None:
    run_on_ranks(2, keep_parameters)


def accumulate_before_the_step() -> None:
    model = sharded(plain_model())
    assert isinstance(model, FSDPModule)
    runner = runner_of(model)
    model.set_requires_gradient_sync(False)
    loss_of(model, samples_of(dist.get_rank(), 2)).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(ValueError, match=r"were not reduce-scattered \(set_requires_gradient_sync\(False\)\)"):
        runner.run(samples_of(dist.get_rank(), SAMPLES), step=1)
    model = sharded(plain_model())
    runner = runner_of(model)
    model.set_requires_gradient_sync(False)
    with pytest.raises(ValueError, match="so they are missing in this"):
        runner.run(samples_of(dist.get_rank(), SAMPLES), step=1)


def test_unreduced_gradients_are_refused() -> None:
    run_on_ranks(2, accumulate_before_the_step)


def replace_the_runner() -> None:
    """Replace the runner, then fail on one rank."""
    model = sharded(plain_model(), replicas=2)
    old = runner_of(model)
    old.run(samples_of(dist.get_rank(), SAMPLES), step=1)
    model.zero_grad(set_to_none=True)
    old.close()
    runner = runner_of(model)
    run_out(runner, 60, step=2)
    runner.close()
    model.zero_grad(set_to_none=True)
    loss_of(model, samples_of(dist.get_rank(), 2)).backward()


def test_second_runner_of_a_model_recovers() -> None:
    run_on_ranks(4, replace_the_runner)
