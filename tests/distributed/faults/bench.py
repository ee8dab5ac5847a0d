"""Run a step of a model with and without an out-of-memory error, for a bitwise comparison."""

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.distributed.faults.scenarios import Scenario
from tests.distributed.models import gradients_of, runner_of
from tests.fault_injection import FaultInjector
from torchtune_adaptive.engine.fsdp import is_whole
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner


def operations_of(runner: StepRunner[Any], run: Callable[[int], object], step: int, case: Scenario) -> list[str]:
    """Collective: list the operations of the first failing rank inside this runner while `run` runs the step."""
    with FaultInjector(runner).count(rank=dist.get_rank(), step=step) as faults:
        run(step)
    names = [faults.operations]
    dist.broadcast_object_list(names, src=case.failing[0])
    return names[0]


def fail_there(faults: FaultInjector, case: Scenario, step: int, place: int) -> None:
    """Inject the fault. Ranks that fail in the same step do so in different places."""
    for number, rank in enumerate(case.failing):
        faults.fail_at(rank=rank, step=step, operation=max(1, place - 17 * number))
        if case.again == "retry":
            faults.fail_at(rank=rank, step=step, operation=37 * place % 900 + 1)
        elif case.again == "drain":
            faults.fail_in_drain(rank=rank, step=step, operation=5 * place % 60 + 1)


def over_ranks(mine: float) -> float:
    """Collective: return the sum over ranks."""
    total = torch.tensor(float(mine), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


class Stepped(NamedTuple):
    """The outcome of a step, compared bit by bit."""

    tensors: list[Tensor | None]
    """Weights or gradients, and other results of a rank."""
    figures: dict[str, float]
    rng: Tensor

    def same_as(self, other: "Stepped") -> bool:
        pairs = [*zip(self.tensors, other.tensors, strict=True), (self.rng, other.rng)]
        return self.figures == other.figures and all(
            mine is its if mine is None or its is None else torch.equal(mine, its) for mine, its in pairs
        )


def average_gradients(model: nn.Module) -> None:
    """Collective: average the gradients of a whole model over ranks. Without a small size of buckets, it has one."""
    gradients = [each.grad for each in reversed([*model.parameters()]) if each.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


class Bench:
    """Collective: a model, its samples, and two ways to run a step."""

    def __init__(self, case: Scenario) -> None:
        self.case, self.samples = case, case.model.samples(case.samples)
        self._steps = count()
        self.models, self.forward_backward = case.model.parts()

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    def undisturbed(self, rows: int) -> Stepped:
        """Collective: run plain microbatches of `rows`, without this package."""
        self._start()
        loss_sum, target_tokens = torch.zeros(()), 0
        for start in range(0, len(self.samples), rows):
            # reduce over replicas once per step, as recommended for loops with replicas
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_all_reduce(start + rows >= len(self.samples))
            totals = self.forward_backward(self.samples[start : start + rows])
            loss_sum, target_tokens = loss_sum + totals.loss_sum, target_tokens + totals.target_tokens
        if is_whole(self.model):
            average_gradients(self.model)
        return self._outcome(Totals(torch.tensor(over_ranks(loss_sum.item())), int(over_ranks(target_tokens))))

    def operations(self) -> list[str]:
        """Collective: list the operations of the first failing rank in a step."""
        runner = self.new_runner()
        self.warm_up(runner)
        self._start()
        names = operations_of(runner, lambda step: runner.run(self.samples, step=step), next(self._steps), self.case)
        runner.close()
        return names

    def disturbed(self, runner: StepRunner[Tensor], place: int | None) -> tuple[Stepped, int]:
        """Collective: run a step that runs out of memory at `place`; return outcome and failures on this rank."""
        self._start()
        runner.load_state_dict(self.fresh)
        step = next(self._steps)
        with FaultInjector(runner, error=self.case.error) as faults:
            if place is not None:
                fail_there(faults, self.case, step, place)
            result = runner.run(self.samples, step=step)
        return self._outcome(Totals(result.loss_sum, result.target_tokens)), faults.fired

    def new_runner(self) -> StepRunner[Tensor]:
        """Collective: return a new runner, with a new model if the case fails in the first pass."""
        if self.case.first_pass:
            self.models, self.forward_backward = self.case.model.parts()
        recovery = Recovery(*self.models, exchanges_activations=self.case.model.exchanges_activations)
        once = self.case.reduce_once
        runner = runner_of(self.model, self.case.rows, self.forward_backward, recovery, reduce_once=once)
        self.fresh = runner.state_dict()
        return runner

    def warm_up(self, runner: StepRunner[Tensor], place: int = 0) -> None:
        """Collective: run the steps that a runner needs before it reduces gradients once per step, or in the backward
        of a whole model. For every second place, run one step more, so that the collectives of such a step are
        recorded."""
        in_backward = is_whole(self.model) and not self.case.first_pass
        for _ in range((2 + place % 2) * self.case.reduce_once + 2 * in_backward):
            self.disturbed(runner, None)

    def _start(self) -> None:
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(7 + dist.get_rank())

    def _outcome(self, totals: Totals) -> Stepped:
        gradients, rng, norm = gradients_of(self.model), torch.get_rng_state(), torch.zeros(())
        if self.case.model.clips:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        figures = {"loss": totals.loss_sum.item(), "tokens": totals.target_tokens}
        return Stepped([*gradients.values(), norm], figures, rng)
