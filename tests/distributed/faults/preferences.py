"""The stages of DPO as its recipes build them, over small models, and the ways in which one may run out of memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import count
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtune.data import padded_collate_sft
from torchtune.rlhf.loss import DPOLoss

from tests.distributed.faults.failing import fail_there, operations_of, ways_to_fail
from tests.distributed.faults.stages import Outcome, frozen
from tests.distributed.models import VOCABULARY, ModelConfig, build, gradients_of
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.engine.governor import Change
from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.testing import FaultInjector
from torchtune_adaptive.tune.bad_samples import NamedSamples
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.finetuning import plan_padding
from torchtune_adaptive.tune.preference import (
    KEPT,
    POLICY,
    REFERENCE,
    PairPass,
    Stages,
    build_stages,
    passes_of,
)
from torchtune_adaptive.tune.samples import PAIR, Sample

PAIRS_OF_A_RANK = 4
HOST, LOSS = torch.device("cpu"), DPOLoss(beta=0.5)
TINY = ModelConfig(layers=1, dim=16)


@dataclass(frozen=True)
class PreferenceCase:
    """The stage in which memory runs out, and how. The rest is as in finetuning.Case."""

    name: str
    stage: str
    model: ModelConfig = TINY
    world_size: int = 2
    failing: tuple[int, ...] = (1,)
    rows: int = 2
    again: str = "never"
    first_pass: bool = False
    stride: int = 1

    def bench(self) -> "PreferenceBench":
        """Collective."""
        return PreferenceBench(self)


def cases() -> Iterator[PreferenceCase]:
    """Every operation of either stage of either recipe, then other ways to fail there, of which some are left out."""
    for recipe, model in {"full": TINY, "lora": replace(TINY, lora=True)}.items():
        for stage in (REFERENCE, POLICY):
            plain = PreferenceCase(f"preferences, {recipe}, {stage}", stage, model)
            yield replace(plain, name=f"{plain.name}, later pass")
            yield from ways_to_fail(plain, other_ways(model))


def other_ways(model: ModelConfig) -> dict[str, dict[str, Any]]:
    gathered, joined = replace(model, reshard_after_forward=False), replace(model, joined=True, dropout=0.0)
    return {
        "no reshard from the first pass on": {"model": gathered, "first_pass": True, "stride": 7},
        "without padding": {"model": joined, "stride": 7},
        "full checkpointing": {"model": replace(model, checkpointing="full"), "stride": 7},
    }


PREFERENCE_CASES = tuple(cases())


class Models(NamedTuple):
    policy: nn.Module
    reference: nn.Module
    """With adapters, the policy itself."""

    @property
    def everything(self) -> list[nn.Module]:
        return [self.policy] if self.reference is self.policy else [*self]


def models_of(config: ModelConfig) -> Models:
    """Collective: a policy and, but for adapters, a reference of another size."""
    policy = build(config)
    return Models(policy, policy if config.lora else frozen(build(replace(config, layers=config.layers + 1))))


COLLATE = partial(padded_collate_sft, padding_idx=0, ignore_idx=-100)


def data_of_pairs() -> Data:
    """As it is before a run plans its padding."""
    return Data(NamedSamples([], PAIR), packed=False, collate=COLLATE, loader=cast(Any, None), max_seq_len=None)


JOINED = AdaptiveConfig(token_budget=1000, padding=False)


def settings_of(config: ModelConfig, rows: int, samples: int) -> Settings:
    sizes: dict[str, Any] = {"batch_size": rows, "gradient_accumulation_steps": samples // rows}
    adaptive = JOINED if config.joined else AdaptiveConfig()
    return Settings(device="cpu", dtype="fp32", output_dir="out", epochs=1, shuffle=True, adaptive=adaptive, **sizes)


def stages_of(models: Models, settings: Settings, on_change: Callable[[Change], object] = lambda _: None) -> Stages:
    """Collective: as the recipes have them."""
    return build_stages(*models, LOSS, data_of_pairs(), settings, HOST, on_change)


def pairs_of_the_step(pairs: int) -> list[Sample]:
    """Of all ranks."""
    generator = torch.Generator().manual_seed(0)

    def answer(name: str) -> Sample:
        length = int(torch.randint(4, 20, (1,), generator=generator))
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        return {f"{name}_input_ids": tokens, f"{name}_labels": [-100, -100, *tokens[2:]]}

    return [{**answer("chosen"), **answer("rejected")} for _ in range(pairs)]


def adapters_off(model: nn.Module) -> bool:
    return not model.training or any(getattr(module, "disabled", False) for module in model.modules())


class PreferenceBench:
    """Collective: the models of both stages, pairs, and the two ways to run a step on them."""

    def __init__(self, case: PreferenceCase) -> None:
        self.case = case
        self._settings = settings_of(case.model, case.rows, PAIRS_OF_A_RANK)
        ranks = dist.get_world_size()
        self._pairs = pairs_of_the_step(PAIRS_OF_A_RANK * ranks)[dist.get_rank() :: ranks]
        self._steps = count()
        self._put_back: Callable[[], None] = lambda: None
        self.models = models_of(case.model)

    def undisturbed(self, rows: int) -> Outcome:
        """Collective: plain FSDP2, without anything of ours but the passes; `rows` in the stage that is to fail."""
        pairs, figures = self._start(), {}
        for name, run in zip((REFERENCE, POLICY), self._passes(), strict=True):
            each = rows if name == self.case.stage else self.case.rows
            parts = [self._microbatch(run, pairs[at : at + each]) for at in range(0, len(pairs), each)]
            figures |= figures_of(name, over_ranks(reduce(Totals.plus, parts)))
        return self._outcome(pairs, figures)

    def _passes(self) -> tuple[PairPass, PairPass]:
        """Collective."""
        data = data_of_pairs()
        plan_padding(data, self.models.policy, self._settings, HOST)
        return passes_of(*self.models, LOSS, data, self._settings, HOST)

    def _microbatch(self, run: PairPass, pairs: Sequence[Sample]) -> Totals:
        """Collective: what a pass without a backward leaves gathered is sharded again after it."""
        totals = run(pairs)
        for module in (each for model in self.models.everything for each in model.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()
        return totals

    def operations(self) -> list[str]:
        """Collective: what the first failing rank does in the stage that is to fail."""
        runner, pairs = self.new_runner(), self._start()
        return operations_of(runner, partial(self._run, pairs), next(self._steps), self.case)

    def disturbed(self, runner: StepRunner[Sample], place: int | None) -> tuple[Outcome, int]:
        """Collective: a step that runs out of memory there; how often it did so on this rank."""
        pairs, step = self._start(), next(self._steps)
        for name, fresh in self._fresh.items():
            self.stages[name].load_state_dict(fresh)
        with FaultInjector(runner) as faults:
            if place is not None:
                fail_there(faults, self.case, step, place)
            figures = self._run(pairs, step)
        assert not adapters_off(self.models.policy), f"the policy does not train after place {place}"
        return self._outcome(pairs, figures), faults.fired

    def new_runner(self) -> StepRunner[Sample]:
        """Collective: of the stage that is to fail, beside the other; of models that have never run, if so said."""
        self._put_back()  # else models that stay would be watched by one more at every place
        if self.case.first_pass:
            self.models = models_of(self.case.model)
        self.stages = stages_of(self.models, self._settings)
        self._fresh, self._put_back = self.stages.state_dict(), self.stages[POLICY].close
        return self.stages[self.case.stage]

    def _run(self, pairs: Sequence[Sample], step: int) -> dict[str, float]:
        """Collective: both stages, as the recipes do."""
        figures = {}
        for stage, result in self.stages.run(pairs, step=step).items():
            figures |= figures_of(stage, Totals(result.loss_sum, result.target_tokens, result.sums))
        return figures

    def _start(self) -> list[Sample]:
        for model in self.models.everything:
            model.zero_grad(set_to_none=True)
        torch.manual_seed(7 + dist.get_rank())
        return [dict(pair) for pair in self._pairs]

    def _outcome(self, pairs: Sequence[Sample], figures: dict[str, float]) -> Outcome:
        kept = {(REFERENCE, number): pair[KEPT] for number, pair in enumerate(pairs)}
        gradients = [gradients_of(model) for model in self.models.everything]
        return Outcome(gradients, kept, figures, torch.get_rng_state())


def over_ranks(totals: Totals) -> Totals:
    """Collective: the sums."""
    names = sorted(totals.sums)
    summed = torch.stack([totals.loss_sum, *(totals.sums[name] for name in names)])
    tokens = torch.tensor(totals.target_tokens)
    dist.all_reduce(summed)
    dist.all_reduce(tokens)
    return Totals(summed[0], int(tokens), dict(zip(names, summed[1:], strict=True)))


def figures_of(stage: str, totals: Totals) -> dict[str, float]:
    """All that a stage says of its step."""
    sums = {f"{stage}: {name}": float(value) for name, value in totals.sums.items()}
    return {f"{stage}: loss": float(totals.loss_sum), f"{stage}: labels": float(totals.target_tokens), **sums}
