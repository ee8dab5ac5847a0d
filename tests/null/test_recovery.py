"""Steps of the recipes recover from errors of torch's allocator; the nightly cases try every tenth operation."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.null.full_card import PPO, in_a_collective, sweep
from tests.null.processes import OnNull, on_null_device
from tests.ranks import RankFailed
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.objectives.preference import REFERENCE


class Case(NamedTuple):
    kind: str
    ranks: int = 1
    expandable: bool = False
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        ranks = f"{self.ranks} gloo ranks" if self.ranks > 1 else "1 process"
        segments = ["expandable segments"] if self.expandable else []
        return ", ".join([self.kind, ranks, *segments, *self.overrides])


RESULTS_BYTES = 512
"""A rank that completes an attempt of the reference stage keeps its log-probabilities, in the allocator's smallest
block, until the repetition overwrites them."""
OFFLOADING = ("enable_activation_checkpointing=True", "enable_activation_offloading=True")
OFTEN = {Case("full", 2, expandable=True): 80, Case("lora"): 40, Case("full_dpo"): 80, Case(PPO): 200}
"""Cases, and the step size between tried operations."""
NIGHTLY = (
    *(Case("full", ranks, expandable) for ranks in (1, 2) for expandable in (False, True)),
    *(Case("full", 3), Case("full", overrides=OFFLOADING), Case("lora_dpo")),
    *(Case(kind, ranks) for kind in ("lora", "full_dpo", PPO) for ranks in (1, 2)),
)


@pytest.mark.smoke("full, 2 gloo ranks, expandable segments", "lora, 1 process")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("case", "every"),
    [
        *(pytest.param(case, every, id=str(case)) for case, every in OFTEN.items()),
        *(pytest.param(case, 10, id=f"{case}, every tenth", marks=pytest.mark.nightly) for case in NIGHTLY),
    ],
)
def test_step_that_runs_out_of_memory_is_repeated_with_its_initial_memory(
    on_null: OnNull, tmp_path: Path, case: Case, every: int
) -> None:
    run_in = str(tmp_path / "run")
    found = on_null(sweep, case.kind, run_in, every, case.expandable, case.overrides, ranks=case.ranks, timeout_s=900)
    operations = list(zip(*(found if case.ranks > 1 else [found]), strict=True))
    recovered = [ranks for ranks in operations if all(each.recoveries == 1 for each in ranks)]
    assert len(recovered) >= max(1, 0.95 * len(operations) - 1)  # a few need no memory, such as the last ones
    for ranks in operations:
        assert len({(each.recoveries, each.position) for each in ranks}) == 1, "ranks disagree"
        assert all(each.recoveries <= 1 and each.kept_bytes <= 0 for each in ranks), ranks
        left_over = [each.left_over_bytes for each in ranks]
        assert min(left_over) <= 0, ranks  # on the rank that failed
        assert max(left_over) <= RESULTS_BYTES * (ranks[0].stage == REFERENCE), ranks


def test_oom_in_gloos_reduce_scatter_is_recovered(on_null: OnNull, tmp_path: Path) -> None:
    assert on_null(in_a_collective, str(tmp_path / "run"), "reduce_scatter", ranks=2) == [1, 1]


def test_oom_in_gloos_all_gather_ends_the_run_with_one_correct_message(on_null: OnNull, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="an FSDP collective ran out of memory on rank 0 inside gloo") as raised:
        on_null(in_a_collective, str(tmp_path / "run"), "allgather", ranks=2)
    assert "besides FSDP" not in str(raised.value)


@on_null_device(ranks=2)
def test_step_without_failures_allocates_only_its_sums() -> None:
    """Compare with a plain loop."""
    model = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(4)))
    for module in (*model, model):
        fully_shard(module)

    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        loss = model(torch.stack([*samples])).sum()
        loss.backward()
        return Totals(loss.detach(), len(samples))

    def allocated() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    kind = SampleKind[Tensor](length_of=len, filler=lambda sample: sample)
    # a loss for each further microbatch, and two copies that are summed over the ranks
    for microbatches, sums in ((1, 2), (2, 3), (8, 9)):
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
        assert ours - plain == sums
