"""What FSDP is told under tensor parallelism, between two steps: scripts and shadow follow, or it is refused."""

from collections.abc import Sequence

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests.distributed import tensors
from tests.distributed.faults.failing import over_ranks
from tests.distributed.faults.finetuning import TENSOR
from tests.distributed.models import Gradients, build, gradients_of, mesh_of, samples_of
from tests.ranks import RankFailed, run_on_ranks
from torchtune_adaptive.comm.tensor import Rehearsal, TensorLedger
from torchtune_adaptive.limits.limit import RowLimit
from torchtune_adaptive.step.runner import StepRunner
from torchtune_adaptive.step.samples import SampleKind
from torchtune_adaptive.testing import FaultInjector

RANKS = 4


def runner_of(model: FSDPModule) -> StepRunner[Tensor]:
    """Collective: two rows a microbatch."""
    rehearsal: Rehearsal[Tensor] = tensors.rehearsal_of(lambda: build(TENSOR, without_data=True), "plain")
    return StepRunner(
        model,
        tensors.forward_backward_of(model, "plain"),
        limit=RowLimit(2),
        kind=SampleKind(length_of=len, stand_in=lambda sample: sample[:2]),
        ledger=TensorLedger(model, mesh_of(tensor_ranks=2)["tp"].get_group(), rehearsal),
    )


def sharded() -> FSDPModule:
    model = build(TENSOR)
    assert isinstance(model, FSDPModule)
    return model


def samples() -> Sequence[Tensor]:
    """The same on the ranks of a tensor group."""
    return samples_of(dist.get_rank() // 2, 4)


def gradients(runner: StepRunner[Tensor], step: int, operation: int | None = None) -> Gradients:
    """Collective: of one step, in which an operation of rank 1 may fail."""
    runner.model.zero_grad(set_to_none=True)
    with FaultInjector(runner) as faults:
        if operation is not None:
            faults.fail_at(rank=1, step=step, operation=operation)
        runner.run(samples(), step=step)
    assert over_ranks(faults.fired) == (operation is not None)
    return gradients_of(runner.model)


def farthest(found: Gradients, expected: Gradients) -> float:
    """The largest difference of any weight's gradient, relative to its largest element."""
    assert found.keys() == expected.keys()
    differences = []
    for name, gradient in found.items():
        known = expected[name]
        assert gradient is not None
        assert known is not None
        differences.append(((gradient - known).abs().max() / known.abs().max()).item())
    return max(differences)


def unfreeze(fails_frozen: bool, operation: int) -> tuple[int, float]:
    """The embedding and the layer are frozen in step 1 and trained in step 2, in which a rank fails."""
    expected = gradients(runner_of(sharded()), step=1)
    model = sharded()
    for module in (model.tok_embeddings, model.layers):
        module.requires_grad_(False)
    runner = runner_of(model)
    gradients(runner, 1, 60 if fails_frozen else None)
    runner.model.requires_grad_(True)
    runner.load_state_dict({**runner.state_dict(), "size": 2})
    return runner.recoveries, farthest(gradients(runner, 2, operation), expected)


@pytest.mark.parametrize("operation", [10, 300])
@pytest.mark.parametrize("fails_frozen", [False, True])
def test_layers_may_be_unfrozen_between_two_steps(fails_frozen: bool, operation: int) -> None:
    for recoveries, error in run_on_ranks(RANKS, unfreeze, fails_frozen, operation):
        assert recoveries == fails_frozen
        assert error < 1e-5


def put_off_scattering() -> None:
    model = sharded()
    runner = runner_of(model)
    gradients(runner, 1)
    model.set_requires_gradient_sync(False)
    gradients(runner, 2, operation=300)


def test_a_rank_that_fails_while_scattering_is_put_off_says_so_and_ends() -> None:
    with pytest.raises(RankFailed, match=r"set_requires_gradient_sync\(False\) puts off scattering gradients, so what"):
        run_on_ranks(RANKS, put_off_scattering)


def accumulate_before_the_step() -> str:
    model = sharded()
    runner = runner_of(model)
    model.set_requires_gradient_sync(False)
    tensors.forward_backward_of(model, "plain")(samples()[:1])
    model.set_requires_gradient_sync(True)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the test reads what it says
        runner.run(samples(), step=1)
    return str(caught.value)


def test_gradients_of_before_that_nobody_sees_are_refused() -> None:
    for said in run_on_ranks(RANKS, accumulate_before_the_step):
        assert "were not scattered (set_requires_gradient_sync(False)) and would be taken for its own" in said


def replace_the_runner() -> tuple[int, float]:
    """The new one is made before the old one is closed; then a rank fails."""
    model = sharded()
    old = runner_of(model)
    expected = gradients(old, 1)
    runner = runner_of(model)
    old.close()
    error = farthest(gradients(runner, 2, operation=300), expected)
    return runner.recoveries, error


def test_a_runner_that_is_replaced_takes_nothing_from_the_new_one() -> None:
    for recoveries, error in run_on_ranks(RANKS, replace_the_runner):
        assert recoveries == 1
        assert error < 1e-5
