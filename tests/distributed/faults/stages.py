"""Steps of several stages, as in preference learning, and the ways in which one may fail."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtune.modules.peft import disable_adapter

from tests.distributed.faults.failing import fail_there, operations_of, over_ranks
from tests.distributed.models import Gradients, ModelConfig, build, gradients_of, same_gradients, samples_of
from torchtune_adaptive.engine.governor import Change
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.engine.step import Recovery, SampleKind, StepRunner
from torchtune_adaptive.testing import FaultInjector

SAMPLES_PER_STEP = 4
REFERENCE, TRAIN = "reference log-probabilities", "train policy"

Numbered: TypeAlias = tuple[int, Tensor]
Pass: TypeAlias = Callable[[Sequence[Numbered]], Totals]
Runners: TypeAlias = dict[str, StepRunner[Numbered]]


class Stage(NamedTuple):
    """What runs, and the models that it runs: the first is the one that it trains, where it trains one."""

    run: Pass
    models: tuple[nn.Module, ...]


@dataclass
class Work:
    """The stages of a step, in their order, and what they keep by sample."""

    stages: dict[str, Stage] = field(default_factory=dict)
    kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def models(self) -> list[nn.Module]:
        return list({id(model): model for stage in self.stages.values() for model in stage.models}.values())

    def scoring(self, name: str, model: nn.Module, *, adapters: bool = True) -> Pass:
        """A pass without a backward, whose results are kept."""

        def score(samples: Sequence[Numbered]) -> Totals:
            with torch.no_grad(), nullcontext() if adapters else disable_adapter(model):
                found = log_probs(model, [tokens for _, tokens in samples])
            for (number, _), each in zip(samples, found, strict=True):
                self.kept[name, number] = each.clone()
            return Totals(found.sum(), len(samples))

        return score

    def of(self, name: str, samples: Sequence[Numbered]) -> Tensor:
        return torch.stack([self.kept[name, number] for number, _ in samples])


def log_probs(model: nn.Module, samples: Sequence[Tensor]) -> Tensor:
    """Of each sample, summed over its tokens."""
    tokens = nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
    counted = nn.utils.rnn.pad_sequence([torch.ones(len(s)) for s in samples], batch_first=True)[:, 1:]
    every = model(tokens)[:, :-1].float().log_softmax(-1)
    return (every.gather(-1, tokens[:, 1:, None])[..., 0] * counted).sum(-1)


def preferring(config: ModelConfig) -> Work:
    """Collective: a frozen reference of another size, then the policy, as in DPO."""
    policy, reference = build(config), frozen(build(replace(config, layers=1)))
    work = Work()
    work.stages[REFERENCE] = Stage(work.scoring(REFERENCE, reference), (reference,))
    work.stages[TRAIN] = Stage(_preferring(work, policy), (policy,))
    return work


def preferring_at_once(config: ModelConfig) -> Work:
    """Collective: the same in one microbatch, so that what the two models communicate is interleaved."""
    policy, reference = build(config), frozen(build(replace(config, layers=1)))
    work = Work()
    refer, train = work.scoring(REFERENCE, reference), _preferring(work, policy)

    def both(samples: Sequence[Numbered]) -> Totals:
        refer(samples)
        return train(samples)

    work.stages[TRAIN] = Stage(both, (policy, reference))
    return work


def preferring_adapters(config: ModelConfig) -> Work:
    """Collective: the reference is the policy without its adapters, as in DPO with LoRA."""
    policy = build(replace(config, lora=True))
    work = Work()
    work.stages[REFERENCE] = Stage(work.scoring(REFERENCE, policy, adapters=False), (policy,))
    work.stages[TRAIN] = Stage(_preferring(work, policy), (policy,))
    return work


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def _preferring(work: Work, policy: nn.Module) -> Pass:
    def train(samples: Sequence[Numbered]) -> Totals:
        margins = log_probs(policy, [tokens for _, tokens in samples]) - work.of(REFERENCE, samples)
        return _backward(-F.logsigmoid(margins))._replace(sums={"margin": margins.detach().sum()})

    return train


def _backward(losses: Tensor) -> Totals:
    losses.sum().backward()
    return Totals(losses.detach().sum(), len(losses))


@dataclass(frozen=True)
class StageCase:
    """A way of training in stages, and the stage in which memory runs out. The rest is as in faults.Case."""

    name: str
    work: Callable[[ModelConfig], Work]
    stage: str
    model: ModelConfig = field(default_factory=ModelConfig)
    world_size: int = 2
    failing: tuple[int, ...] = (1,)
    rows: int = 2
    again: str = "never"
    first_pass: bool = False
    stride: int = 1

    def bench(self) -> "StageBench":
        """Collective."""
        return StageBench(self)


GATHERED, CHECKPOINTED = ModelConfig(reshard_after_forward=False), ModelConfig(checkpointing="full")
HYBRID = ModelConfig(replicas=2)

STAGE_CASES = (
    StageCase("stages, dpo, reference", preferring, REFERENCE),
    StageCase("stages, dpo, reference, first pass", preferring, REFERENCE, first_pass=True),
    StageCase("stages, dpo, reference, no reshard", preferring, REFERENCE, GATHERED),
    StageCase("stages, dpo, reference, no reshard, first pass", preferring, REFERENCE, GATHERED, first_pass=True),
    StageCase("stages, dpo, reference, drain too", preferring, REFERENCE, rows=4, again="drain"),
    StageCase("stages, dpo, policy", preferring, TRAIN),
    StageCase("stages, dpo, policy, first pass", preferring, TRAIN, first_pass=True),
    StageCase("stages, dpo, policy, no reshard", preferring, TRAIN, GATHERED),
    StageCase("stages, dpo, policy, no reshard, first pass", preferring, TRAIN, GATHERED, first_pass=True),
    StageCase("stages, dpo, policy, checkpointing", preferring, TRAIN, CHECKPOINTED),
    StageCase("stages, dpo, policy, 3 ranks, two fail", preferring, TRAIN, world_size=3, failing=(0, 2), stride=7),
    StageCase("stages, dpo, reference, hybrid", preferring, REFERENCE, HYBRID, world_size=4, stride=5),
    StageCase("stages, dpo, policy, hybrid", preferring, TRAIN, HYBRID, world_size=4, stride=5),
    StageCase("stages, dpo at once", preferring_at_once, TRAIN),
    StageCase("stages, dpo at once, first pass", preferring_at_once, TRAIN, first_pass=True, stride=3),
    StageCase("stages, dpo at once, no reshard", preferring_at_once, TRAIN, GATHERED, stride=3),
    StageCase("stages, lora dpo, reference", preferring_adapters, REFERENCE),
    StageCase("stages, lora dpo, reference, first pass", preferring_adapters, REFERENCE, first_pass=True),
    StageCase("stages, lora dpo, reference, no reshard", preferring_adapters, REFERENCE, GATHERED),
    StageCase("stages, lora dpo, policy", preferring_adapters, TRAIN),
    StageCase("stages, lora dpo, policy, first pass", preferring_adapters, TRAIN, first_pass=True),
    StageCase("stages, lora dpo, policy, checkpointing", preferring_adapters, TRAIN, CHECKPOINTED),
)


class Outcome(NamedTuple):
    """What comes out of a step, bit by bit."""

    gradients: list[Gradients]
    kept: dict[tuple[str, int], Tensor]
    losses: dict[str, float]
    rng: Tensor

    def same_as(self, other: "Outcome") -> bool:
        return (
            self.kept.keys() == other.kept.keys()
            and all(torch.equal(self.kept[key], other.kept[key]) for key in self.kept)
            and all(same_gradients(mine, its) for mine, its in zip(self.gradients, other.gradients, strict=True))
            and self.losses == other.losses
            and torch.equal(self.rng, other.rng)
        )


class StageBench:
    """Collective: the models of all stages, their samples, and the two ways to run a step on them."""

    def __init__(self, case: StageCase) -> None:
        self.case = case
        self.samples = list(enumerate(samples_of(dist.get_rank(), SAMPLES_PER_STEP)))
        self._steps = count()
        self._renew()

    def _renew(self) -> None:
        self.work = self.case.work(self.case.model)
        self.changes: list[Change] = []

    def undisturbed(self, rows: int) -> Outcome:
        """Collective: plain FSDP2, without anything of ours; `rows` in the stage that is to fail."""
        self._start()
        losses = {}
        for name, stage in self.work.stages.items():
            each = rows if name == self.case.stage else self.case.rows
            parts = [stage.run(self.samples[start : start + each]) for start in self._starts(each)]
            mine = sum((part.loss_sum for part in parts[1:]), parts[0].loss_sum)
            losses[name] = torch.tensor(over_ranks(mine.item()), dtype=torch.float32).item()
        return self._outcome(losses)

    def _starts(self, rows: int) -> Iterator[int]:
        """Where microbatches begin. What a pass without a backward leaves gathered is sharded again after each."""
        for start in range(0, SAMPLES_PER_STEP, rows):
            for model in self.work.models:
                model.set_requires_all_reduce(start + rows >= SAMPLES_PER_STEP)
            yield start
            for module in (each for model in self.work.models for each in model.modules()):
                if isinstance(module, FSDPModule):
                    module.reshard()

    def operations(self) -> list[str]:
        """Collective: what the first failing rank does in the stage that is to fail."""
        runner = self.new_runner()
        self._start()
        names = operations_of(runner, self._run, next(self._steps), self.case)
        runner.close()
        return names

    def disturbed(self, runner: StepRunner[Numbered], place: int | None) -> tuple[Outcome, int]:
        """Collective: a step that runs out of memory there; how often it did so on this rank."""
        self._start()
        for name, each in self._runners.items():
            each.load_state_dict(self._fresh[name])
        step = next(self._steps)
        with FaultInjector(runner) as faults:
            if place is not None:
                fail_there(faults, self.case, step, place)
            losses = self._run(step)
        return self._outcome(losses), faults.fired

    def new_runner(self) -> StepRunner[Numbered]:
        """Collective: of the stage that is to fail, and of all others; of models that have never run, if so said."""
        if self.case.first_pass:
            self._renew()
        recovery = Recovery(*self.work.models, on_change=self.changes.append)
        self._runners = {
            name: StepRunner(
                stage.models[0],
                stage.run,
                limit=RowLimit(self.case.rows),
                kind=SampleKind(
                    length_of=lambda sample: len(sample[1]), stand_in=lambda sample: (sample[0], sample[1][:2])
                ),
                recovery=recovery,
                stage=name,
            )
            for name, stage in self.work.stages.items()
        }
        self._fresh = {name: runner.state_dict() for name, runner in self._runners.items()}
        return self._runners[self.case.stage]

    def _run(self, step: int) -> dict[str, float]:
        return {name: each.run(self.samples, step=step).loss_sum.item() for name, each in self._runners.items()}

    def _start(self) -> None:
        for model in self.work.models:
            model.zero_grad(set_to_none=True)
        self.work.kept.clear()
        torch.manual_seed(7 + dist.get_rank())

    def _outcome(self, losses: dict[str, float]) -> Outcome:
        return Outcome(
            [gradients_of(model) for model in self.work.models], dict(self.work.kept), losses, torch.get_rng_state()
        )
