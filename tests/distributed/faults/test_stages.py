"""Steps of several stages survive running out of memory. Every operation: `python -m tests.distributed.faults`."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.faults.stages import STAGE_CASES, TRAIN, StageBench, StageCase, preferring_at_once
from tests.distributed.faults.sweeps import sweep
from tests.distributed.models import ModelConfig, build
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.engine.step import Recovery, SampleKind, StepRunner
from torchtune_adaptive.testing import FaultInjector

SAMPLED = 3  # operations of the stage that fails
CASES = [case for case in STAGE_CASES if case.stride == 1 or {"train policy", "hybrid"} & {*case.name.split(", ")}]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(", ", "-").replace(" ", "_"))
def test_a_stage_that_runs_out_of_memory_is_run_again_and_leaves_what_plain_fsdp_leaves(case: StageCase):
    for outcome in run_on_ranks(case.world_size, sweep, case, SAMPLED, timeout_s=150):
        assert outcome == (SAMPLED, SAMPLED, 0, 0)


def sums_of_a_step() -> tuple[list[float], list[float], str]:
    bench = StageBench(StageCase("sums", preferring_at_once, TRAIN, ModelConfig(dropout=0.0)))
    runner = bench.new_runner()
    with FaultInjector(runner).fail_at(rank=1, step=3, operation=300):
        result = runner.run(bench.samples, step=3)
    mine = bench.work.stages[TRAIN].run(bench.samples)
    expected = torch.stack([mine.loss_sum, mine.sums["margin"]])
    dist.all_reduce(expected)
    assert bench.changes[0].stage == TRAIN
    return [result.loss_sum.item(), result.sums["margin"].item()], expected.tolist(), bench.changes[0].reason


def test_sums_are_those_of_all_ranks_and_messages_name_the_stage():
    for found, expected, reason in run_on_ranks(2, sums_of_a_step, timeout_s=100):
        assert found == pytest.approx(expected, rel=1e-5)
        assert reason.startswith("step 3, train policy: out of memory on rank 1 ")


def is_gathered(model: nn.Module) -> bool:
    return fsdp.awaits_backward(model) or not all(group.is_sharded for group in fsdp.groups_of(model))


def left_gathered(recover: bool) -> tuple[bool, bool]:
    """Collective: whether a plain forward leaves parameters gathered, and a stage without a backward."""
    model, tokens = build(ModelConfig(dropout=0.0)), torch.arange(6)

    def ask(samples: Sequence[torch.Tensor]) -> Totals:
        with torch.no_grad():
            return Totals(model(torch.stack([*samples])).sum(), len(samples))

    ask([tokens])
    plain = is_gathered(model)
    runner = StepRunner(
        model,
        ask,
        limit=RowLimit(2),
        kind=SampleKind(length_of=len, stand_in=lambda sample: sample),
        recovery=Recovery(model, enabled=recover),
    )
    runner.run([tokens, tokens], step=0)
    return plain, is_gathered(model)


@pytest.mark.parametrize("recover", [True, False])
def test_a_stage_without_a_backward_leaves_nothing_gathered_whether_or_not_it_could_be_run_again(recover: bool):
    """Whoever writes into parameters, as a search does at its end, would write where nothing is."""
    assert run_on_ranks(2, left_gathered, recover, timeout_s=30) == [(True, False)] * 2
