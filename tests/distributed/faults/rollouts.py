"""The stages of PPO as its recipe builds them, of tiny models, and the ways in which one may run out of memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtune.rlhf.loss import PPOLoss

from tests.distributed.faults.failing import fail_there, operations_of, over_ranks, ways_to_fail
from tests.distributed.faults.stages import Outcome, frozen
from tests.distributed.models import VOCABULARY, ModelConfig, build, gradients_of, shard
from tests.recipes.ppo.rollouts import ppo_config
from torchtune_adaptive.demo.model import demo_classifier
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.rl.generation import sampling_of
from torchtune_adaptive.rl.models import Models
from torchtune_adaptive.rl.ppo import keep_advantages, ppo_stages
from torchtune_adaptive.rl.rollouts import Rollout, gathered, rollouts_of, updates_of
from torchtune_adaptive.rl.settings import read_ppo_settings
from torchtune_adaptive.rl.stages import (
    FORWARD,
    GENERATE,
    STAGES,
    TRAIN_POLICY,
    TRAIN_VALUE,
    RolloutStage,
    RolloutStages,
)
from torchtune_adaptive.testing import FaultInjector

ROLLOUTS, NEW, STOP, SEED = 4, 2, 3, 5
"""Of a rank; tokens of an answer; what ends one."""
PASSES = (GENERATE, *FORWARD)
HOST = torch.device("cpu")


@dataclass(frozen=True)
class RolloutCase:
    """The stage in which memory runs out, and how. The rest is as in faults.Case."""

    name: str
    stage: str
    model: ModelConfig = field(default_factory=lambda: ModelConfig(layers=1, dim=16, dropout=0.0))
    whole: bool = False
    """Whether the other stages of the iteration run, too; else it alone does, on what they have found once."""
    layer_by_layer: bool = False
    """To generate, parameters are gathered anew for every token."""
    world_size: int = 2
    failing: tuple[int, ...] = (1,)
    rows: int = 2
    again: str = "never"
    first_pass: bool = False
    """Whether its model, or in a whole iteration every model, has never run before."""
    stride: int = 1

    def bench(self) -> "RolloutBench":
        """Collective."""
        return RolloutBench(self)


WITH_OTHER_STAGES: dict[str, dict[str, Any]] = {
    "whole iteration": {"whole": True, "stride": 31},
    "first iteration": {"whole": True, "first_pass": True, "stride": 43},
}


def cases() -> Iterator[RolloutCase]:
    """Every operation of every stage, then other ways to fail in it, of which some operations are left out."""
    for stage in STAGES:
        plain = RolloutCase(f"rollouts, {stage}", stage)
        yield plain
        yield from ways_to_fail(plain, WITH_OTHER_STAGES)
    by_layer = RolloutCase(f"rollouts, {GENERATE}, layer by layer", GENERATE, layer_by_layer=True)
    yield by_layer
    yield replace(by_layer, name=f"{by_layer.name}, first pass", first_pass=True)


ROLLOUT_CASES = tuple(cases())


def policy(config: ModelConfig) -> nn.Module:
    """Collective: a model whose answers depend on their prompts."""
    model = build(config)
    with torch.no_grad():
        for parameter in model.output.parameters():
            parameter *= 20
    return model


def judge(config: ModelConfig, seed: int) -> nn.Module:
    """Collective: a model of values or rewards. Its last layer has one row, so most ranks have none of it."""
    torch.manual_seed(seed)
    sizes = {"num_layers": config.layers, "embed_dim": config.dim, "intermediate_dim": config.dim, "max_seq_len": 64}
    model = demo_classifier(vocab_size=VOCABULARY, **sizes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.05)
    return shard(model.train(), config)


MAKERS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "policy": policy,
    "value": lambda config: judge(config, 1),
    "reference": lambda config: frozen(build(config)),
    "reward": lambda config: frozen(judge(config, 2)),
}
"""The models of an iteration, each made alike on all ranks."""
RUNS = dict(zip(STAGES, ("policy", "policy", "reference", "value", "reward", "value", "policy"), strict=True))
"""Stage -> what it runs."""


def prompts_of(rank: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(2, 5, (ROLLOUTS,), generator=generator).tolist()
    return [{"tokens": torch.randint(4, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


Run: TypeAlias = Callable[[str, Sequence[Rollout]], float]


class RolloutBench:
    """Collective: the models of all stages, prompts, and the two ways to run an iteration on them."""

    def __init__(self, case: RolloutCase) -> None:
        self.case = case
        sizes = (
            f"batch_size={ROLLOUTS}",
            f"ppo_batch_size={ROLLOUTS}",
            "ppo_epochs=1",
            f"forward_batch_size={case.rows}",
        )
        splits = (f"gradient_accumulation_steps={ROLLOUTS // case.rows}", f"max_generated_tokens={NEW}")
        resharding = f"fsdp_reshard_after_forward={case.model.reshard_after_forward}"
        cfg = ppo_config(Path("unused"), *sizes, *splits, resharding, f"stop_token_ids=[{STOP}]")
        self._settings, self._ppo = read_ppo_settings(cfg)
        self._loss = PPOLoss(epsilon=0.2, value_coeff=0.1)
        self._sampling = sampling_of(SimpleNamespace(pad_id=0), self._ppo, SEED)
        self._steps = count()
        self.models = Models(**{name: make(case.model) for name, make in MAKERS.items()})
        self._found: list[Rollout] = []
        self._put_back: Callable[[], None] = lambda: None
        if not case.whole:
            self._iterate(self._find_what_comes_before(self._plain(case.rows)))

    def _find_what_comes_before(self, run: Run) -> Run:
        """Keeps the samples of the stage that is to fail, as the stages before it leave them."""

        def run_and_keep(name: str, rollouts: Sequence[Rollout]) -> float:
            if name == self.case.stage:
                self._found = copies(rollouts)
            return run(name, rollouts)

        return run_and_keep

    def undisturbed(self, rows: int) -> Outcome:
        """Collective: plain FSDP2, without anything of ours but the passes; `rows` in the stage that is to fail."""
        self._start()
        return self._outcome(self._plain(rows))

    def _stages(self) -> dict[str, RolloutStage]:
        return ppo_stages(self.models, self._loss, self._sampling, self._settings, self._ppo, HOST)

    def _plain(self, rows: int) -> Run:
        stages = self._stages()
        generate: Any = stages[GENERATE].run
        generate.stays = not self.case.layer_by_layer

        def run(name: str, rollouts: Sequence[Rollout]) -> float:
            each, loss = rows if name == self.case.stage else self.case.rows, torch.zeros(())
            for start in range(0, len(rollouts), each):
                loss = loss + stages[name].run(rollouts[start : start + each]).loss_sum
                self._reshard()
            return torch.tensor(over_ranks(loss.item()), dtype=torch.float32).item()

        return run

    def _reshard(self) -> None:
        """What a pass without a backward leaves gathered."""
        for module in (each for model in self.models.everything for each in model.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def _outcome(self, run: Run) -> Outcome:
        """Collective: of an iteration, or of one stage."""
        if self.case.whole:
            rollouts, figures = self._iterate(run)
        else:
            rollouts = copies(self._found)
            figures = {self.case.stage: run(self.case.stage, rollouts)}
        kept = {(name, each.number): found for each in rollouts for name, found in each.results.items()}
        kept |= {("answer", each.number): each.answer for each in rollouts}
        gradients = [gradients_of(model) for model in self.models.everything]
        return Outcome(gradients, kept, figures, torch.get_rng_state())

    def _iterate(self, run: Run) -> tuple[list[Rollout], dict[str, float]]:
        """Collective: as the recipe does, up to the first update."""
        mine = rollouts_of(prompts_of(dist.get_rank()), 1, NEW)
        figures = {name: run(name, mine) for name in PASSES}
        everything = gathered(mine)
        figures |= keep_advantages(everything, self._ppo)
        [share] = updates_of(everything, ROLLOUTS, 1, SEED)
        return everything, figures | {name: run(name, share) for name in (TRAIN_VALUE, TRAIN_POLICY)}

    def operations(self) -> list[str]:
        """Collective: what the first failing rank does in the stage that is to fail."""
        runner = self.new_runner()
        self._start()
        return operations_of(runner, lambda step: self._outcome(self._running(step)), next(self._steps), self.case)

    def disturbed(self, runner: StepRunner[Rollout], place: int | None) -> tuple[Outcome, int]:
        """Collective: an iteration that runs out of memory there; how often it did so on this rank."""
        self._start()
        self.stages.load_state_dict(self._fresh)
        step = next(self._steps)
        with FaultInjector(runner) as faults:
            if place is not None:
                fail_there(faults, self.case, step, place)
            outcome = self._outcome(self._running(step))
        return outcome, faults.fired

    def _running(self, step: int) -> Run:
        return lambda name, rollouts: self.stages.runners[name].run(rollouts, step=step).loss_sum.item()

    def new_runner(self) -> StepRunner[Rollout]:
        """Collective: of the stage that is to fail, among all others; of models that have never run, if so said."""
        self._put_back()  # else models that stay would be watched by one more at every place
        if self.case.first_pass:
            new = list(MAKERS) if self.case.whole else [RUNS[self.case.stage]]
            self.models = replace(self.models, **{name: MAKERS[name](self.case.model) for name in new})
        self.stages = RolloutStages(self._stages(), self._settings, lambda _: None)
        if self.case.layer_by_layer:
            self.stages.go_layer_by_layer()
        self._fresh, self._put_back = self.stages.state_dict(), self.stages.runners.training.recovery.ledger.close
        return self.stages.runners[self.case.stage]

    def _start(self) -> None:
        for model in self.models.everything:
            model.zero_grad(set_to_none=True)
        if not self.case.whole and self.case.stage == TRAIN_POLICY:
            for parameter in self.models.value.parameters():  # which are there by then, and have to stay
                parameter.grad = torch.ones_like(parameter)
        torch.manual_seed(7 + dist.get_rank())


def copies(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """What a stage finds is not written into the ones that were given."""
    return [replace(each, results=dict(each.results)) for each in rollouts]
