"""Stages: steps that run several models, or no backward at all, and still survive running out of memory."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.distributed.models import Gradients, ModelConfig, build, gradients_of, same_gradients, samples_of
from tests.ranks import run_on_ranks
from torchtune_adaptive.comm.ledger import CollectiveLedger
from torchtune_adaptive.limits.change import Change
from torchtune_adaptive.limits.limit import RowLimit
from torchtune_adaptive.step.runner import StepRunner, Totals
from torchtune_adaptive.testing import FaultInjector

SAMPLES = 4
PLACES = 5  # operations of a stage, evenly spread
STAGE = "reference log-probabilities"

Runners: TypeAlias = dict[str, StepRunner[tuple[int, Tensor]]]


def log_probs(model: nn.Module, samples: Sequence[Tensor]) -> Tensor:
    """Of each sample, summed over its tokens."""
    tokens = nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
    counted = nn.utils.rnn.pad_sequence([torch.ones(len(s)) for s in samples], batch_first=True)[:, 1:]
    every = model(tokens)[:, :-1].float().log_softmax(-1)
    return (every.gather(-1, tokens[:, 1:, None])[..., 0] * counted).sum(-1)


class Outcome(NamedTuple):
    """What comes out of a step, bit by bit."""

    gradients: Gradients
    kept: dict[int, Tensor]

    def same_as(self, other: "Outcome") -> bool:
        kept = self.kept.keys() == other.kept.keys()
        return (
            kept
            and all(torch.equal(self.kept[index], other.kept[index]) for index in self.kept)
            and same_gradients(self.gradients, other.gradients)
        )


class Preferring:
    """A policy and a frozen reference: by turns in one microbatch, or the reference first, as a stage of its own."""

    def __init__(self, reshard: bool, *, together: bool) -> None:
        self.policy = build(ModelConfig(dropout=0.0, reshard_after_forward=reshard))
        self.reference = build(ModelConfig(dropout=0.0, reshard_after_forward=reshard, layers=3))
        self.reference.requires_grad_(False).eval()
        self.together = together
        self.kept: dict[int, Tensor] = {}
        self.stages = {"train policy": self.train} if together else {STAGE: self.refer, "train policy": self.train}
        self.samples = list(enumerate(samples_of(dist.get_rank(), SAMPLES)))

    def refer(self, samples: Sequence[tuple[int, Tensor]]) -> Totals:
        with torch.no_grad():
            found = log_probs(self.reference, [tokens for _, tokens in samples])
        self.kept.update({index: each.clone() for (index, _), each in zip(samples, found, strict=True)})
        return Totals(torch.zeros(()), len(samples))

    def train(self, samples: Sequence[tuple[int, Tensor]]) -> Totals:
        if self.together:
            self.refer(samples)
        reference = torch.stack([self.kept[index] for index, _ in samples])
        policy = log_probs(self.policy, [tokens for _, tokens in samples])
        losses = -nn.functional.logsigmoid(policy - reference)
        losses.sum().backward()
        return Totals(losses.detach().sum(), len(samples), {"margin": (policy - reference).detach().sum()})

    def plain(self, rows: dict[str, int]) -> "Outcome":
        """Collective: FSDP2 without anything of ours, in microbatches of so many rows in each stage."""
        for name, stage in self.stages.items():
            for start in range(0, SAMPLES, rows[name]):
                stage(self.samples[start : start + rows[name]])
                for module in (*self.policy.modules(), *self.reference.modules()):
                    if isinstance(module, FSDPModule):
                        module.reshard()
        return self.outcome()

    def outcome(self) -> "Outcome":
        """What the stages have left behind, which is cleared."""
        found = Outcome(gradients_of(self.policy), dict(self.kept))
        self.policy.zero_grad(set_to_none=True)
        self.kept.clear()
        return found

    def runners(self, rows: int) -> Runners:
        """Collective: one for each stage, with one ledger for both models."""
        ledger = CollectiveLedger(self.policy, self.reference)
        return {
            name: StepRunner(
                self.policy,
                stage,
                limit=RowLimit(rows),
                length_of=lambda sample: len(sample[1]),
                stand_in=lambda sample: (sample[0], sample[1][:2]),
                ledger=ledger,
                frozen=[self.reference],
                stage=name,
            )
            for name, stage in self.stages.items()
        }


def step_of(bench: Preferring, runners: Runners, step: int = 0) -> Outcome:
    """Collective: all stages of a step, one after the other."""
    for runner in runners.values():
        runner.run(bench.samples, step=step)
    return bench.outcome()


def survive(reshard: bool, together: bool, failing: str, first_pass: bool) -> tuple[int, int, int]:
    """Collective: places that failed, that were recovered from, and that left something else than plain FSDP2."""
    bench = Preferring(reshard, together=together)
    count = operations_of(bench, failing)
    runners = bench.runners(2)
    fresh = {name: runner.state_dict() for name, runner in runners.items()}
    step_of(bench, runners)
    expected = bench.plain({name: 2 - (name == failing) for name in runners})
    injected = recovered = wrong = 0
    for place in range(1, count, -(-count // PLACES)):
        if first_pass:
            bench = Preferring(reshard, together=together)
            runners = bench.runners(2)
        for name, runner in runners.items():
            runner.load_state_dict(fresh[name])
        with FaultInjector(runners[failing]).fail_at(rank=1, step=7, operation=place) as faults:
            found = step_of(bench, runners, step=7)
        fired = torch.tensor([float(faults.fired), float(not found.same_as(expected))])
        dist.all_reduce(fired)
        injected += fired[0].item() > 0
        recovered += runners[failing].limit.rows == 1
        wrong += fired[1].item() > 0
    return injected, recovered, wrong


def operations_of(bench: Preferring, stage: str) -> int:
    runners = bench.runners(2)
    with FaultInjector(runners[stage]).count(rank=1, step=7) as faults:
        step_of(bench, runners, step=7)
    next(iter(runners.values())).close()
    counts = [len(faults.operations)]
    dist.broadcast_object_list(counts, src=1)
    return counts[0]


CASES = [
    (reshard, together, failing, first_pass)
    for reshard in (True, False)
    for together, failing in ((True, "train policy"), (False, "train policy"), (False, STAGE))
    for first_pass in (False, True)
]


@pytest.mark.parametrize(("reshard", "together", "failing", "first_pass"), CASES)
def test_a_stage_that_runs_out_of_memory_is_run_again(reshard: bool, together: bool, failing: str, first_pass: bool):
    for outcome in run_on_ranks(2, survive, reshard, together, failing, first_pass, timeout_s=150):
        assert outcome == (PLACES, PLACES, 0)


def sums_of_a_step() -> tuple[list[float], list[float], str]:
    bench = Preferring(reshard=True, together=True)
    runners = bench.runners(2)
    told: list[Change] = []
    runners["train policy"].on_change = told.append
    with FaultInjector(runners["train policy"]).fail_at(rank=1, step=3, operation=300):
        result = runners["train policy"].run(bench.samples, step=3)
    mine = bench.train(bench.samples)
    expected = torch.stack([mine.loss_sum, mine.sums["margin"]])
    dist.all_reduce(expected)
    assert told[0].stage == "train policy"
    return [result.loss_sum.item(), result.sums["margin"].item()], expected.tolist(), told[0].reason


def test_sums_are_those_of_all_ranks_and_messages_name_the_stage():
    for found, expected, reason in run_on_ranks(2, sums_of_a_step, timeout_s=100):
        assert found == pytest.approx(expected, rel=1e-5)
        assert reason.startswith("step 3, train policy: out of memory on rank 1 ")
