"""Inject an out-of-memory error at operations of a step of `Trainer.train()`, and compare with stock.

`make faults` tries every operation.
"""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from tests.distributed.faults.sweeps import TrainerCase
from tests.distributed.models import computes, device
from tests.fault_injection import FaultInjector
from tests.hf.trainers import Counting, arguments, difference, train, use_fsdp2
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveMixin

COUNTED = 3
"""The step whose operations are counted; in each later step, one of them fails. Gradients are reduced as later."""
OPERATIONS = 1700
"""More than a step has."""


class Sweeping(AdaptiveMixin):
    """Fail once per step, on the ranks in turn, and begin every step with the initial limit."""

    every = first = 1
    operations = injected = 0

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        step = self.state.global_step + 1
        if self._steps is None or not self.accelerator.sync_gradients:
            return super().training_step(model, *args, **kwargs)
        runner, operation = self._steps.runner, self.first + self.every * (step - COUNTED - 1)
        with FaultInjector(runner) as faults:
            if step == COUNTED:
                self._limit = runner.state_dict()
                faults.count(rank=dist.get_rank(), step=step)
            elif step > COUNTED and operation <= self.operations:
                runner.load_state_dict({**runner.state_dict(), "size": self._limit["size"]})
                faults.fail_at(rank=step % dist.get_world_size(), step=step, operation=operation)
                self.injected += 1
            loss = super().training_step(model, *args, **kwargs)
        if step == COUNTED:
            counts = [len(faults.operations)]
            dist.broadcast_object_list(counts)
            self.operations = counts[0]
        return loss


def sweep(case: TrainerCase, at_most: int, shift: int) -> tuple[int, int, int, int]:
    """Collective: return the fields of an Outcome."""
    if case.sharded:
        use_fsdp2()
    every = max(case.stride, -(-OPERATIONS // at_most))
    steps = COUNTED + 1 + OPERATIONS // every
    trainers: list[Any] = []

    class Kept(Sweeping, Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.every, self.first = every, 1 + shift % every
            trainers.append(self)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if not computes():  # the check of the loss compares values
                loss.detach().copy_(torch.ones(()))
            return loss

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        settings: dict[str, Any] = {"max_steps": steps, "learning_rate": 1e-3, "gradient_accumulation_steps": 2}
        options: dict[str, Any] = {
            "arguments": arguments(Path(folder), use_cpu=device().type == "cpu", **settings),
            "train_dataset": Counting(
                64 * case.world_size
            ),  # all steps are complete, so all have the same number of operations
        }
        stock = train(Path(folder), **options) if computes() else None
        ours = train(Path(folder), AdaptiveArguments(regrow_after=0), base=Kept, **options)
    wrong = stock is not None and difference(ours, stock) > 1e-6
    return trainers[0].injected, int(ours.column("oom_recoveries")[-1]), 0, int(wrong)
