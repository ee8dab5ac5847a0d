"""Steps of the recipes recover from errors of torch's allocator; `tests.null.recovery` tries more operations."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.null.full_card import PPO, in_a_collective, in_the_update
from tests.null.processes import OnNull
from tests.null.recovery import Case, run
from tests.ranks import RankFailed
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner

CASES = {Case("full", 2, expandable=True): 80, Case("lora"): 40, Case("full_dpo"): 80, Case(PPO): 200}
"""Cases, and the step size between tried operations."""


@pytest.mark.smoke("full, 2 gloo ranks, expandable segments", "lora, 1 process")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_that_runs_out_of_memory_is_repeated_with_its_initial_memory(on_null: OnNull, case: Case) -> None:
    counted = run(on_null, case, every=CASES[case])
    assert counted.recovered >= counted.operations - 1  # the last operations may need no memory
    assert (counted.most_left_over_bytes, counted.wrong) == (0, 0)


def test_oom_in_gloos_reduce_scatter_is_recovered(on_null: OnNull, tmp_path: Path) -> None:
    assert on_null(in_a_collective, "full", str(tmp_path / "run"), "reduce_scatter", ranks=2) == [1, 1]


def test_oom_in_gloos_all_gather_ends_the_run_with_one_correct_message(on_null: OnNull, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="an FSDP collective ran out of memory on rank 0 inside gloo") as raised:
        on_null(in_a_collective, "full", str(tmp_path / "run"), "allgather", ranks=2)
    assert "besides FSDP" not in str(raised.value)


def test_oom_in_the_optimizer_ends_the_run_with_one_message(on_null: OnNull, tmp_path: Path) -> None:
    message = on_null(in_the_update, "full", str(tmp_path / "run"))
    assert message.startswith("OutOfMemoryError: ")
    assert "the optimizer step" in message


def allocations() -> list[tuple[int, int]]:
    """Return allocations of a plain loop and of StepRunner, for steps of 1, 2 and 8 microbatches without failures."""
    model = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(4)))
    for module in (*model, model):
        fully_shard(module)

    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        loss = model(torch.stack([*samples])).sum()
        loss.backward()
        return Totals(loss.detach(), len(samples))

    def allocated() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    found = []
    kind = SampleKind[Tensor](length_of=len, filler=lambda sample: sample)
    for microbatches in (1, 2, 8):
        samples = [torch.ones(64, device="cuda") for _ in range(microbatches)]
        before = allocated()
        for sample in samples:
            forward_backward([sample])
        plain = allocated() - before
        model.zero_grad(set_to_none=True)
        runner = StepRunner(model, forward_backward, kind=kind, limit=RowLimit(1))
        for step in range(2):  # the first step records collectives
            before = allocated()
            runner.run(samples, step=step)
            ours = allocated() - before
            model.zero_grad(set_to_none=True)
        runner.close()
        found.append((plain, ours))
    return found


def test_step_without_failures_allocates_only_its_sums(on_null: OnNull) -> None:
    for ranks in on_null(allocations, ranks=2):
        # a loss for each further microbatch, and two copies that are summed over the ranks
        assert [ours - plain for plain, ours in ranks] == [2, 3, 9]
