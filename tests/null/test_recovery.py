"""Steps of the recipes recover from the errors that torch's own allocator raises; `tests.null.recovery` tries more."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.null.processes import OnNull
from tests.null.recovery import Case, run
from tests.null.scarce import PPO, in_a_collective, in_the_update
from tests.ranks import RankFailed
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.engine.step import SampleKind, StepRunner

CASES = {Case("full", 2, expandable=True): 80, Case("lora"): 40, Case("full_dpo"): 80, Case(PPO): 200}
"""And which operations are tried: every so many."""


@pytest.mark.smoke("full, 2 gloo ranks, expandable segments", "lora, 1 process")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_runs_out_of_memory_is_repeated_with_all_memory_it_had(on_null: OnNull, case: Case) -> None:
    counted = run(on_null, case, every=CASES[case])
    assert counted.recovered >= counted.operations - 1  # the last operations may need no memory
    assert (counted.most_left_over_bytes, counted.wrong) == (0, 0)


def test_no_room_for_gloo_to_reduce_is_recovered(on_null: OnNull, tmp_path: Path) -> None:
    assert on_null(in_a_collective, "full", str(tmp_path / "run"), "reduce_scatter", ranks=2) == [1, 1]


def test_no_room_for_gloo_to_gather_ends_the_run_with_one_true_message(on_null: OnNull, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="an FSDP collective ran out of memory on rank 0 inside gloo") as raised:
        on_null(in_a_collective, "full", str(tmp_path / "run"), "allgather", ranks=2)
    assert "besides FSDP" not in str(raised.value)


def test_no_room_for_the_optimizer_ends_the_run_with_one_message(on_null: OnNull, tmp_path: Path) -> None:
    said = on_null(in_the_update, "full", str(tmp_path / "run"))
    assert said.startswith("OutOfMemoryError: ")
    assert "the optimizer step" in said


def allocations() -> list[tuple[int, int]]:
    """Of a plain loop and of StepRunner, for steps of 1, 2 and 8 microbatches in which nothing fails."""
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
    kind = SampleKind[Tensor](length_of=len, stand_in=lambda sample: sample)
    for microbatches in (1, 2, 8):
        samples = [torch.ones(64, device="cuda") for _ in range(microbatches)]
        before = allocated()
        for sample in samples:
            forward_backward([sample])
        plain = allocated() - before
        model.zero_grad(set_to_none=True)
        runner = StepRunner(model, forward_backward, kind=kind, limit=RowLimit(1))
        for step in range(2):  # the first one is noted
            before = allocated()
            runner.run(samples, step=step)
            ours = allocated() - before
            model.zero_grad(set_to_none=True)
        runner.close()
        found.append((plain, ours))
    return found


def test_a_step_allocates_nothing_but_its_sums_where_nothing_fails(on_null: OnNull) -> None:
    for ranks in on_null(allocations, ranks=2):
        # a loss for each further microbatch, and two copies that are summed over the ranks
        assert [ours - plain for plain, ours in ranks] == [2, 3, 9]
