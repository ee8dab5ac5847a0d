"""Steps of one model, as in finetuning, with out-of-memory errors injected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.distributed.faults.fault_variants import fail_there, operations_of
from tests.distributed.models import (
    Gradients,
    ModelConfig,
    build,
    forward_backward_of,
    frozen,
    gradients_equal,
    gradients_of,
    samples_of,
)
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import Recovery, SampleKind, StepRunner
from torchtune_adaptive.testing import FaultInjector


@dataclass(frozen=True)
class Case:
    """A training configuration with the ranks and operations that fail."""

    name: str
    model: ModelConfig = field(default_factory=ModelConfig)
    world_size: int = 2
    failing: tuple[int, ...] = (1,)
    rows: int = 2
    """Initial rows per microbatch; four samples are two microbatches of two rows."""
    samples: int = 4
    again: str = "never"
    """When a second failure occurs: "never", in the "retry" or in the "drain"."""
    first_pass: bool = False
    """Fail in the very first step of the model."""
    error: Callable[[str], Exception] = torch.OutOfMemoryError
    with_frozen_model: bool = False
    """Call a frozen model in each microbatch too, so that collectives of two models interleave."""
    stride: int = 1
    """Step size of the exhaustive sweep; 1 tries every operation."""

    def bench(self) -> "Bench":
        """Collective: return the bench for this case."""
        return Bench(self)


JOINED = ModelConfig(joined=True, dropout=0.0)
HYBRID = ModelConfig(replicas=2)
OFFLOADED = ModelConfig(offload=True)

CASES = (
    Case("plain"),
    Case("plain, rank 0 fails", failing=(0,), stride=2),
    Case("plain, all ranks fail", failing=(0, 1), stride=3),
    Case("plain, 3 ranks, the last fails", world_size=3, failing=(2,), stride=5),
    Case("plain, 3 ranks, two fail", world_size=3, failing=(0, 2), stride=7),
    Case("fails in the retry too", rows=4, again="retry"),
    Case("fails in the drain too", rows=4, again="drain"),
    Case("first pass", first_pass=True),
    Case("first pass, fails in the drain too", rows=4, first_pass=True, again="drain", stride=3),
    Case("first pass, all ranks fail", failing=(0, 1), first_pass=True, stride=5),
    Case("full checkpointing", ModelConfig(checkpointing="full")),
    Case("selective checkpointing", ModelConfig(checkpointing="selective")),
    Case("no reshard after forward", ModelConfig(reshard_after_forward=False)),
    Case("head in chunks", ModelConfig(head_chunks=4), stride=2),
    Case("head in chunks, first pass", ModelConfig(head_chunks=4), first_pass=True, stride=3),
    Case("head in chunks, fails in the drain too", ModelConfig(head_chunks=4), rows=4, again="drain", stride=5),
    Case("head in chunks, hybrid", ModelConfig(head_chunks=4, replicas=2), 4, rows=4, again="retry", stride=7),
    Case(
        "head in chunks, hybrid, fails in the drain too",
        ModelConfig(head_chunks=4, replicas=2),
        4,
        rows=4,
        again="drain",
        stride=11,
    ),
    Case("lora", ModelConfig(lora=True)),
    Case("lora, full checkpointing", ModelConfig(lora=True, checkpointing="full"), stride=3),
    Case("bf16", ModelConfig(bf16=True)),
    Case("without padding", JOINED),
    Case("without padding, fails in the drain too", JOINED, rows=4, again="drain"),
    Case("without padding, first pass", JOINED, first_pass=True),
    Case("without padding, full checkpointing", replace(JOINED, checkpointing="full")),
    Case("without padding, lora", replace(JOINED, lora=True)),
    Case("bf16, full checkpointing", ModelConfig(bf16=True, checkpointing="full"), stride=3),
    Case("with a frozen model", with_frozen_model=True),
    Case("with a frozen model, first pass", with_frozen_model=True, first_pass=True, stride=3),
    Case("with a frozen model, no reshard", ModelConfig(reshard_after_forward=False), with_frozen_model=True, stride=3),
    Case("hybrid", HYBRID, 4),
    Case("hybrid, rank 0 fails", HYBRID, 4, (0,), stride=3),
    Case("hybrid, a rank of each replica fails", HYBRID, 4, (0, 3), stride=3),
    Case("hybrid, both ranks of a replica fail", HYBRID, 4, (2, 3), stride=5),
    Case("hybrid, fails in the retry too", HYBRID, 4, rows=4, again="retry", stride=3),
    Case("hybrid, fails in the drain too", HYBRID, 4, samples=8, rows=4, again="drain", stride=3),
    Case("hybrid, first pass", HYBRID, 4, first_pass=True, stride=3),
    Case("hybrid, first pass, fails in the drain too", HYBRID, 4, (2,), 4, 8, "drain", first_pass=True, stride=5),
    Case("hybrid, one microbatch", HYBRID, 4, rows=4, stride=5),
    Case("hybrid, no reshard after forward", replace(HYBRID, reshard_after_forward=False), 4, stride=5),
    Case("hybrid, bf16", replace(HYBRID, bf16=True), 4, stride=3),
    Case("hybrid, lora, full checkpointing", replace(HYBRID, lora=True, checkpointing="full"), 4, stride=5),
    Case("hybrid, whole replicas", ModelConfig(replicas=4), 4, stride=5),
    Case("offloaded", OFFLOADED),
    Case("offloaded, fails in the drain too", OFFLOADED, rows=4, again="drain", stride=3),
    Case("offloaded, first pass", OFFLOADED, first_pass=True, stride=3),
    Case("offloaded, full checkpointing", replace(OFFLOADED, checkpointing="full"), stride=5),
    Case("offloaded, bf16", replace(OFFLOADED, bf16=True), stride=5),
    Case("offloaded, hybrid", replace(OFFLOADED, replicas=2), 4, stride=5),
)


class Step(NamedTuple):
    """The outcome of a step, compared bit by bit."""

    gradients: Gradients
    loss_sum: float
    target_tokens: int
    grad_norm: Tensor
    rng: Tensor

    def same_as(self, other: "Step") -> bool:
        return (
            gradients_equal(self.gradients, other.gradients)
            and self[1:3] == other[1:3]
            and torch.equal(self.grad_norm, other.grad_norm)
            and torch.equal(self.rng, other.rng)
        )


def asking(reference: nn.Module, train: Callable[[Sequence[Tensor]], Totals]) -> Callable[[Sequence[Tensor]], Totals]:
    """Add the output of the reference to the loss, as a constant."""

    def both(samples: Sequence[Tensor]) -> Totals:
        with torch.no_grad():
            asked = reference(nn.utils.rnn.pad_sequence(list(samples), batch_first=True)).mean()
        totals = train(samples)
        return totals._replace(loss_sum=totals.loss_sum + asked)

    return both


class Bench:
    """Collective: a model, its samples, and two ways to run a step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.samples = samples_of(dist.get_rank(), case.samples)
        self._steps = count()
        self._renew()

    def _renew(self) -> None:
        config = self.case.model
        self.models = [build(config)]
        self.model, self.forward_backward = self.models[0], forward_backward_of(self.models[0], joined=config.joined)
        if self.case.with_frozen_model:
            self.models.append(frozen(build(replace(config, layers=1))))
            self.forward_backward = asking(self.models[1], self.forward_backward)

    def undisturbed(self, rows: int) -> Step:
        """Collective: run plain FSDP2 in microbatches of `rows`, without our code."""
        self._start()
        loss_sum, target_tokens = torch.zeros(()), 0
        for start in range(0, self.case.samples, rows):
            # reduce over replicas once per step, as recommended for loops with replicas
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_all_reduce(start + rows >= self.case.samples)
            totals = self.forward_backward(self.samples[start : start + rows])
            loss_sum, target_tokens = loss_sum + totals.loss_sum, target_tokens + totals.target_tokens
        over_ranks = torch.tensor([loss_sum.item(), target_tokens], dtype=torch.float64)
        dist.all_reduce(over_ranks)
        loss, tokens = over_ranks.tolist()
        return self._outcome(Totals(torch.tensor(loss), int(tokens)))

    def operations(self) -> list[str]:
        """Collective: list the operations of the first failing rank in a step."""
        self._start()
        runner = self.new_runner()
        names = operations_of(runner, lambda step: runner.run(self.samples, step=step), next(self._steps), self.case)
        runner.close()
        return names

    def disturbed(self, runner: StepRunner[Tensor], place: int | None) -> tuple[Step, int]:
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
            self._renew()
        runner = StepRunner(
            self.model,
            self.forward_backward,
            limit=RowLimit(self.case.rows),
            kind=SampleKind(length_of=len, stand_in=lambda sample: sample[:2]),
            recovery=Recovery(*self.models),
        )
        self.fresh = runner.state_dict()
        return runner

    def _start(self) -> None:
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(7 + dist.get_rank())

    def _outcome(self, totals: Totals) -> Step:
        gradients, rng = gradients_of(self.model), torch.get_rng_state()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor()
        return Step(gradients, totals.loss_sum.item(), totals.target_tokens, norm, rng)
