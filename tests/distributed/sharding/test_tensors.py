"""Tensor parallelism: what a failed rank owes its peers, what DTensor remembers, and what is refused by name."""

import itertools
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.distributed import tensors
from tests.distributed.faults.finetuning import TENSOR, Bench, Case
from tests.distributed.models import build, mesh_of, samples_of
from tests.hearing import listening
from tests.ranks import RankFailed, run_on_ranks
from torchtune_adaptive.comm.tensor import Rehearsal, TensorLedger
from torchtune_adaptive.comm.tensor.masks import Masks
from torchtune_adaptive.errors import RecoveryUnsupportedError
from torchtune_adaptive.limits.limit import RowLimit
from torchtune_adaptive.step.runner import StepRunner, Totals
from torchtune_adaptive.step.samples import SampleKind
from torchtune_adaptive.testing import FaultInjector

ForwardBackward = Callable[[Sequence[Tensor]], Totals]


def fail_in_the_lookup_then_train_on_other_tokens(keeps_masks: bool) -> bool:
    """Whether the step after the recovery has the gradients of plain tensor parallelism."""
    bench = Bench(Case("", TENSOR))
    lookups = [number for number, name in enumerate(bench.operations(), 1) if name == "aten.embedding.default"]
    runner = bench.new_runner()
    bench.disturbed(runner, None)  # or the pass without data would be the next to look up
    with mock.patch.object(Masks, "empty") if keeps_masks else nullcontext():
        bench.disturbed(runner, lookups[1] + 1)  # the first is that of the DTensor, and masks what the second looks up
        assert runner.recoveries == 1
        runner.load_state_dict(bench.fresh)
        bench.samples = [(sample + 17) % 64 for sample in bench.samples]
        step, _ = bench.disturbed(runner, None)
    return step.same_as(bench.undisturbed(bench.case.rows))


def test_other_tokens_of_the_same_shape_can_be_looked_up_after_a_lookup_that_failed_half_way():
    assert run_on_ranks(2, fail_in_the_lookup_then_train_on_other_tokens, False) == [True, True]


def test_without_emptying_the_masks_they_could_not():
    with pytest.raises(RankFailed, match="MaskBuffer has been materialized with conflicting data"):
        run_on_ranks(2, fail_in_the_lookup_then_train_on_other_tokens, True)


PROGRAM = Path(__file__).parents[3] / "docs" / "upstream" / "mask_buffer.py"


def test_the_program_for_upstream_shows_it():
    ran = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=240, check=True)
    assert ran.stdout.splitlines() == [
        "after a whole lookup, the second runs",
        "after an interrupted one, the second fails: MaskBuffer has been materialized with conflicting data",
    ]


def test_it_does_so_without_the_comparison_too():
    lines = [line for line in PROGRAM.read_text().splitlines() if "interrupt_the_first=False))" not in line]
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=240, check=True
    )
    assert ran.stdout == "after an interrupted one, the second fails: MaskBuffer has been materialized with " + (
        "conflicting data\n"
    )


def runner_of(
    change: Callable[[nn.Module, ForwardBackward], ForwardBackward], rehearsed: Rehearsal[Tensor] | None = None
) -> StepRunner[Tensor]:
    """Collective: of a model whose microbatches, but not the passes without data, are changed."""
    model = build(TENSOR)
    ledger = TensorLedger(model, mesh_of(tensor_ranks=2)["tp"].get_group(), rehearsed or rehearsal())
    return StepRunner(
        model,
        change(model, tensors.forward_backward_of(model, "plain")),
        limit=RowLimit(2),
        kind=SampleKind(length_of=len, stand_in=lambda sample: sample[:2]),
        ledger=ledger,
    )


def rehearsal() -> Rehearsal[Tensor]:
    return tensors.rehearsal_of(lambda: build(TENSOR, without_data=True), "plain")


def speaking(how: str) -> Callable[[nn.Module, ForwardBackward], ForwardBackward]:
    """Microbatches that communicate besides: in all of them, or only from the second step on."""
    calls = 0

    def change(_: nn.Module, forward_backward: ForwardBackward) -> ForwardBackward:
        def run(samples: Sequence[Tensor]) -> Totals:
            nonlocal calls
            calls += 1
            group = mesh_of(tensor_ranks=2)["tp"].get_group()
            if how == "plain":
                dist.all_reduce(torch.ones(3), group=group)
            elif how == "unlisted":
                functional.all_to_all_single(torch.ones(2), None, None, group).sum()
            elif how == "later" and calls > 2:
                functional.all_reduce(torch.ones(3), "sum", group).sum()
            return forward_backward(samples)

        return run

    return change


def run_three_steps(how: str, fails: bool) -> tuple[str, int]:
    runner = runner_of(speaking(how))
    samples = [torch.arange(1, 7)] * 4  # two microbatches of the same shape
    with listening("torchtune_adaptive.step.attempt") as heard, FaultInjector(runner) as faults:
        if fails:
            faults.fail_at(rank=1, step=3, operation=200)
        for step in range(1, 4):
            runner.model.zero_grad()
            runner.run(samples, step=step)
    return "\n".join(heard), runner.recoveries


@pytest.mark.parametrize(
    ("how", "named"), [("plain", "c10d::allreduce_"), ("unlisted", "all_to_all_single"), ("later", "the same shape")]
)
def test_what_no_script_has_switches_recovery_off_and_is_named(how: str, named: str):
    (heard, recoveries), (elsewhere, _) = run_on_ranks(2, run_three_steps, how, False)
    assert recoveries == 0
    assert heard.count("training goes on without recovery") == 1
    assert named in heard
    assert elsewhere == ""
    with pytest.raises(RankFailed, match=r"RecoveryUnsupportedError: out of memory on rank 1.*no script of its shape"):
        run_on_ranks(2, run_three_steps, how, True)


def fail_at_a_new_shape(rehearsed: str) -> int:
    """How often the step was run again, whose second microbatch fails before it communicates anything."""

    def run(model: nn.Module, batch: tensors.Batch) -> Tensor:
        loss = tensors.run("plain", model, batch)
        if rehearsed == "says more" or (rehearsed == "asks for data" and bool(loss > 0)):
            functional.all_reduce(torch.ones(3), "sum", mesh_of(tensor_ranks=2)["tp"].get_group())
        return loss

    def failing(_: nn.Module, forward_backward: ForwardBackward) -> ForwardBackward:
        passes = itertools.count(1)

        def run(samples: Sequence[Tensor]) -> Totals:
            if next(passes) == 2 and dist.get_rank() == 1:
                raise torch.OutOfMemoryError("injected")
            return forward_backward(samples)

        return run

    runner = runner_of(failing, replace(rehearsal(), run=run))
    runner.run([torch.arange(1, length) for length in (7, 7, 9, 9)], step=1)
    return runner.recoveries


def test_a_pass_without_data_is_compared_with_one_that_had_data_before_anything_is_sent():
    assert run_on_ranks(2, fail_at_a_new_shape, "says the same") == [1, 1]
    with pytest.raises(RankFailed, match=r"RecoveryUnsupportedError: out of memory on rank 1.*a pass without data"):
        run_on_ranks(2, fail_at_a_new_shape, "says more", timeout_s=20)


def test_a_pass_that_asks_for_its_data_is_refused():
    with pytest.raises(RankFailed, match=r"out of memory on rank 1.*may depend on its data, so a pass without data"):
        run_on_ranks(2, fail_at_a_new_shape, "asks for data", timeout_s=20)


def reasons() -> dict[str, str | None]:
    group = mesh_of(tensor_ranks=2)["tp"].get_group()

    def why(*layers: nn.Module) -> str | None:
        model = nn.Sequential(nn.Linear(4, 4), *layers)
        parallelize_module(model, mesh_of(tensor_ranks=2)["tp"], {"0": ColwiseParallel()})
        return TensorLedger(model, group, rehearsal()).why_recovery_is_off(model)

    compiled = nn.ReLU()
    compiled.compile()
    drops = nn.Module()
    drops.attn_dropout = 0.1
    model = build(TENSOR)
    ledger = TensorLedger(model, group, rehearsal())
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        nccl = ledger.why_recovery_is_off(model)
        allowed = TensorLedger(model, group, rehearsal(), untested_backends=True).why_recovery_is_off(model)
    return {
        "none": ledger.why_recovery_is_off(model),
        "compiled": why(compiled),
        "dropout": why(nn.Dropout(0.1)),
        "attention dropout": why(drops),
        "switched off": why(nn.Dropout(0.0)),
        "nccl": nccl,
        "allowed": allowed,
    }


def test_what_cannot_be_repeated_is_refused_by_name():
    for found in run_on_ranks(2, reasons):
        assert {case for case, reason in found.items() if reason is None} == {"none", "switched off", "allowed"}
        assert "compiled" in found["compiled"]
        assert "dropout" in found["dropout"]
        assert "dropout" in found["attention dropout"]
        assert "gloo" in found["nccl"]


def refuse_a_compiled_model() -> str:
    model = build(TENSOR)
    model.layers[0].compile()
    ledger = TensorLedger(model, mesh_of(tensor_ranks=2)["tp"].get_group(), rehearsal())
    try:
        StepRunner(
            model,
            tensors.forward_backward_of(model, "plain"),
            limit=RowLimit(2),
            kind=SampleKind(length_of=len, stand_in=lambda sample: sample[:2]),
            ledger=ledger,
        )
    except RecoveryUnsupportedError as error:
        return str(error)
    return ""


def test_a_runner_refuses_a_compiled_model():
    assert all("compiled" in told for told in run_on_ranks(2, refuse_a_compiled_model))


def drop_what_was_issued() -> tuple[int, int]:
    issued: list[weakref.ref[Tensor]] = []

    def change(_: nn.Module, forward_backward: ForwardBackward) -> ForwardBackward:
        def run(samples: Sequence[Tensor]) -> Totals:
            group = mesh_of(tensor_ranks=2)["tp"].get_group().group_name
            issued.append(weakref.ref(torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", group)))
            return forward_backward(samples)

        return run

    runner = runner_of(change)
    runner.run(samples_of(0, 2), step=1)
    return sum(each() is not None for each in issued), torch._C._distributed_c10d._get_work_registry_size()


def test_what_a_program_issues_and_never_waits_for_is_waited_for():
    assert run_on_ranks(2, drop_what_was_issued) == [(0, 0), (0, 0)]
