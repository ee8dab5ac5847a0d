"""Faults occur exactly where requested. One process; tests/distributed has several ranks."""

import torch

from tests.fault_injection import FaultInjector
from tests.unit.engine.test_runner import SAMPLES, a_model, runner_of
from torchtune_adaptive import RowLimit, Totals


def test_failing_operation_does_not_run():
    runner = runner_of(a_model(), 4)
    with FaultInjector(runner).count(rank=0, step=0) as faults:
        runner.run(SAMPLES, step=0)
    operations = faults.operations
    assert operations[0] == "aten.stack.default"
    assert "aten.pow.Tensor_Scalar" in operations
    again = runner_of(a_model(), 4)
    at = operations.index("aten.pow.Tensor_Scalar") + 1
    with FaultInjector(again).fail_at(rank=0, step=0, operation=at).fail_at(rank=0, step=0, operation=at) as faults:
        again.run(SAMPLES, step=0)
    assert faults.fired == 2  # the second in the repeated step
    assert again.limit == RowLimit(1)


def test_growing_storage_is_an_operation():
    storage, resize = torch.empty(0).untyped_storage(), torch.UntypedStorage.resize_

    def growing(samples):
        storage.resize_(64)
        storage.resize_(0)
        return Totals(torch.ones(()), len(samples))

    runner = runner_of(a_model(), 8, forward_backward=growing)
    with FaultInjector(runner).count(rank=0, step=0) as faults:
        runner.run(SAMPLES, step=0)
    assert faults.operations.count("resize_") == 1  # shrinking needs no memory
    assert torch.UntypedStorage.resize_ is resize
