"""Inject an out-of-memory error at each operation of a step of `Trainer.train()`, and compare with stock.

torchrun --nproc_per_node 2 -m tests.hf.faults [EVERY [FIRST]]   every operation, or every EVERY-th from the FIRST on
torchrun --nproc_per_node 2 -m tests.hf.faults EVERY FIRST DDP   under DDP in place of FSDP2
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from tests.fault_injection import FaultInjector
from tests.hf.trainers import Counting, arguments, difference, train, use_fsdp2
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveMixin

COUNTED = 3
"""The step whose operations are counted; in each later step, one of them fails. Gradients are reduced as later."""


class Swept(NamedTuple):
    operations: int
    injected: int
    recovered: int
    difference: float
    """Largest difference from stock over all steps."""


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


def sweep(every: int, steps: int, first: int = 1, *, sharded: bool = True) -> Swept:
    """Collective."""
    if sharded:
        use_fsdp2()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "arguments": arguments(Path(folder), max_steps=steps, learning_rate=1e-3, gradient_accumulation_steps=2),
            "train_dataset": Counting(128),  # all steps are complete, so all have the same number of operations
        }
        stock = train(Path(folder), **options)
        trainers: list[Any] = []

        class Kept(Sweeping, Trainer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.every, self.first = every, first
                trainers.append(self)

        ours = train(Path(folder), AdaptiveArguments(regrow_after=0), base=Kept, **options)
        [trainer] = trainers
        return Swept(
            trainer.operations, trainer.injected, int(ours.column("oom_recoveries")[-1]), difference(ours, stock)
        )


if __name__ == "__main__":
    every, first = [*map(int, sys.argv[1:3]), 1, 1][:2]
    print(sweep(every, COUNTED + 1 + 1700 // every, first, sharded="DDP" not in sys.argv))
