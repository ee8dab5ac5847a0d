"""A recipe's step on a card that fills up at a chosen operation: torch's allocator raises its out-of-memory error."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from gpu_rehearsal.device import set_memory, used_memory

from tests.fault_injection import FaultInjector
from tests.recipes.ppo.rollouts import NEW, ppo_config
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.engine.step import PassKind, StepRunner
from torchtune_adaptive.lifecycle import distributed
from torchtune_adaptive.rl.rollouts import worst_rollout

PPO = "full_ppo"
CARD = 80 * 2**30
ROWS = 8


class Scarcity(FaultInjector):
    """Fills the card to the last block from a chosen operation to the end of its pass.

    Except while a collective is issued, unless `in_collectives`: gloo then copies on the card, which NCCL does not,
    and an all-gather without memory for its copies ends the run.
    """

    def __init__(self, runner: StepRunner[Any], *, in_collectives: bool = False) -> None:
        super().__init__(runner)
        self._in_collectives = in_collectives
        self.live_bytes: list[int] = []
        """Bytes at the start of each microbatch."""
        self._scarce, self._hog = False, list[torch.Tensor]()

    def tick(self, operation: str) -> None:
        try:
            super().tick(operation)
        except torch.OutOfMemoryError:
            self._scarce = True
        if operation.startswith("c10d") and not self._in_collectives:
            self._let_go()
        elif self._scarce and not self._hog:
            self._hog = everything_left()

    def _let_go(self) -> None:
        self._hog = []
        set_memory(CARD)

    @contextmanager
    def _context_for(self, pass_kind: PassKind) -> Iterator[None]:
        if pass_kind == "microbatch":
            self.live_bytes.append(settled(min(self.live_bytes, default=None)))
        try:
            with super()._context_for(pass_kind):
                yield
        finally:
            self._scarce = False
            self._let_go()


def settled(expected: int | None) -> int:
    """Return the allocated bytes after gloo's threads have freed the buffers of finished collectives."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        until = time.monotonic() + (0.03 if expected is None else 0.3)
        while torch.cuda.memory_allocated() > (expected or 0) and time.monotonic() < until:
            time.sleep(0.01)
    return torch.cuda.memory_allocated()


def everything_left() -> list[torch.Tensor]:
    """Allocate blocks until no byte is free, on the card and between used blocks."""
    torch.cuda.empty_cache()
    set_memory(used_memory())
    blocks, size = [], 2**30
    while size >= 512:
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return blocks


class Outcome(NamedTuple):
    """The outcome on this rank of a step in which the card filled up at one operation."""

    stage: str
    recoveries: int
    """0: the card was not used after that."""
    left_over_bytes: int
    """Bytes by which the repeated attempt started with less memory."""
    kept_bytes: int
    """Bytes allocated after the step that were not before."""
    position: int
    """Number of collectives issued by the stage."""


class Bench:
    """Collective: a recipe after setup, with the samples of one step."""

    def __init__(self, kind: str, folder: str, *overrides: str) -> None:
        logging.disable(logging.WARNING)  # the runner reports every recovery
        os.environ["LOCAL_RANK"] = "0"  # the only card of each process is number 0
        torch.cuda.set_device(0)
        rows = "device=cuda", f"batch_size={ROWS}", "gradient_accumulation_steps=1"
        with mock.patch.object(distributed, "join_on") if dist.is_initialized() else nullcontext():
            if kind == PPO:
                # no value is computed that decides whether a cache has room
                self._answers = torch.library.Library("aten", "IMPL")
                self._answers.impl("_local_scalar_dense", lambda asked: asked.dtype is torch.bool, "CUDA")
                self.recipe = load_ours(kind)(ppo_config(Path(folder), *rows, f"ppo_batch_size={ROWS}", *overrides))
            else:
                self.recipe = load_ours(kind)(demo_config(kind, Path(folder), *rows, *overrides))
        self.recipe.setup()
        loop = self.recipe.loop
        if kind == PPO:  # answers are not computed, so they have the maximum length
            self.samples = [worst_rollout(torch.ones(NEW, dtype=torch.long), NEW)] * ROWS
        else:
            schedule = loop.schedule
            loop.stages.use_limits(schedule.limits_of(loop.stages, schedule.epochs[0]))
            self.samples, _ = next(schedule.steps(loop.data.loader, schedule.epochs[0], self.recipe.run.progress))
        self.stages = loop.stages
        self._limits = self.stages.state_dict()
        self.number = 0

    def step(self) -> dict[str, int]:
        """Collective: run the stages, then free gradients; return each stage's out-of-memory errors."""
        self.number += 1
        for stage, state in self._limits.items():
            self.stages[stage].load_state_dict(state)
        results = self.stages.run([deepcopy(sample) for sample in self.samples], step=self.number)
        self.recipe.loop.model.zero_grad()
        return {stage: result.recoveries for stage, result in results.items()}

    def operations(self, stage: str) -> list[str]:
        """Collective: list the operations of an undisturbed step."""
        runner = self.stages[stage]
        with FaultInjector(runner).count(rank=rank(), step=self.number + 1) as counted:
            self.step()
        return counted.operations

    def run_out(self, stage: str, operation: int, failing: int) -> Outcome:
        """Collective: run a step in which one rank runs out of memory."""
        before = settled(None)
        with Scarcity(self.stages[stage]).fail_at(rank=failing, step=self.number + 1, operation=operation) as scarcity:
            recoveries = self.step()[stage]
        first, *others = scarcity.live_bytes
        return Outcome(
            stage,
            recoveries,
            left_over_bytes=others[0] - first if recoveries else 0,
            kept_bytes=settled(before) - before,
            position=self.stages[stage].recovery.ledger.position,
        )


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def sweep(kind: str, folder: str, every: int, expandable: bool, overrides: tuple[str, ...] = ()) -> list[Outcome]:
    """Collective: fail at every `every`-th operation of each stage, on alternating ranks."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
    bench = Bench(kind, folder, *overrides)
    bench.step()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return [
        bench.run_out(stage, operation, failing=operation // every % ranks)
        for stage in bench.stages
        for operation in range(1, len(bench.operations(stage)) + 1, every)
    ]


def in_a_collective(folder: str, name: str) -> int:
    """Collective: return the recoveries of a step in which rank 0's card is full while gloo issues a collective."""
    bench = Bench("full", folder)
    bench.step()
    runner = bench.stages.training
    at = next(n for n, each in enumerate(bench.operations(""), 1) if name in each)
    with Scarcity(runner, in_collectives=True).fail_at(rank=0, step=bench.number + 1, operation=at):
        return runner.run(bench.samples, step=bench.number + 1).recoveries
