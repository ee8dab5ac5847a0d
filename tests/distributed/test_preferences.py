"""Both stages of a preference step: gradients that no split and no number of ranks changes, and recovery in either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtune.data import padded_collate_sft
from torchtune.rlhf.loss import DPOLoss

from tests.distributed.models import VOCABULARY, ModelConfig, build, gradients_of, same_gradients
from tests.ranks import run_on_ranks
from torchtune_adaptive.limits.change import Change
from torchtune_adaptive.limits.limit import Limit, RowLimit, TokenLimit
from torchtune_adaptive.record.events import Event
from torchtune_adaptive.testing import FaultInjector
from torchtune_adaptive.tune.parts.preference import KEPT, PAIRS, POLICY, REFERENCE, Stages, build_stages
from torchtune_adaptive.tune.parts.samples import PAIR, Sample
from torchtune_adaptive.tune.start.sections import AdaptiveConfig
from torchtune_adaptive.tune.start.settings import Settings

ALL_PAIRS = 12
SETTINGS = Settings(
    device="cpu", dtype="fp32", output_dir="out", batch_size=3, gradient_accumulation_steps=2, epochs=1, shuffle=True
)


def pairs_of_the_step() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)

    def answer(name: str) -> Sample:
        length = int(torch.randint(4, 20, (1,), generator=generator))
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        return {f"{name}_input_ids": tokens, f"{name}_labels": [-100, -100, *tokens[2:]]}

    return [{**answer("chosen"), **answer("rejected")} for _ in range(ALL_PAIRS)]


def own_pairs() -> list[Sample]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return pairs_of_the_step()[rank::ranks]


class Bench:
    """Both stages over a small model, on all ranks there are."""

    def __init__(self, *, lora: bool, joined: bool = False, reshard: bool = True) -> None:
        sharded = dist.get_world_size() > 1
        config = ModelConfig(dropout=0.0, lora=lora, sharded=sharded, reshard_after_forward=reshard)
        self.policy = self.reference = build(config)
        if lora:  # new adapters are zero, and with them the difference to the reference
            for index, parameter in enumerate(p for p in self.policy.parameters() if p.requires_grad):
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                own.data.add_(0.02 * (1 + index % 3))
        else:
            self.reference = build(replace(config, layers=3)).requires_grad_(False).eval()
        self.events: list[Event] = []
        collate = partial(padded_collate_sft, padding_idx=0, ignore_idx=-100)
        data: Any = SimpleNamespace(kind=PAIR, collate=collate, packed=False)
        adaptive = AdaptiveConfig(token_budget=1000, padding=not joined) if joined else AdaptiveConfig()
        self.stages: Stages = build_stages(
            self.policy,
            self.reference,
            DPOLoss(beta=0.5),
            data,
            SETTINGS,
            adaptive,
            torch.device("cpu"),
            self.events.append,
        )

    def step(self, pairs: Sequence[Sample], step: int = 1) -> Any:
        """Collective: both stages."""
        pairs = [dict(pair) for pair in pairs]
        self.stages.reference.run(pairs, step=step)
        result = self.stages.policy.run(pairs, step=step)
        return result, torch.stack([pair[KEPT] for pair in pairs])


def whole(model: nn.Module) -> dict[str, Any]:
    """Collective: the gradients of the mean over pairs, of all ranks; no tensors, which live as long as their rank."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {name: (gradient * dist.get_world_size() / ALL_PAIRS).numpy() for name, gradient in full.items()}


def outcome(lora: bool, limit: Limit, joined: bool = False) -> tuple[dict[str, Any], dict[str, float]]:
    bench = Bench(lora=lora, joined=joined)
    for stage in bench.stages:
        stage.use_limit(limit)
    result, _ = bench.step(own_pairs())
    sums = {name: float(value) for name, value in result.sums.items() if "padded" not in name}
    del sums["microbatches"]
    return whole(bench.policy), {**sums, "loss": float(result.loss_sum), "labels": float(result.target_tokens)}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradient_and_figures_do_not_depend_on_the_split_nor_on_the_ranks(lora: bool) -> None:
    expected, figures = run_on_ranks(1, outcome, lora, RowLimit(ALL_PAIRS), timeout_s=60)[0]
    assert figures[PAIRS] == ALL_PAIRS
    assert max(abs(gradient).max() for gradient in expected.values()) > 1e-4
    others = [
        (1, RowLimit(1), False),
        (2, RowLimit(4), False),
        (3, RowLimit(3), False),
        (2, TokenLimit(90, rows_per_sample=2), False),
        (3, TokenLimit(70), True),
    ]
    for ranks, limit, joined in others:
        for gradients, found in run_on_ranks(ranks, outcome, lora, limit, joined, timeout_s=60):
            assert found == pytest.approx(figures, rel=1e-5, abs=1e-5), (ranks, limit)
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6, err_msg=f"{name} {limit}")


def fillers() -> tuple[bool, float, float]:
    """Of a step beside a filler: whether the gradient is the step's, the pairs counted, and the difference in loss."""
    bench = Bench(lora=False)
    pairs = [dict(pair) for pair in own_pairs()]
    bench.stages.reference.run(pairs, step=1)
    first = bench.stages.policy.attempt([pairs])
    alone = gradients_of(bench.policy)
    bench.policy.zero_grad(set_to_none=True)
    attempt = bench.stages.policy.attempt([pairs, [PAIR.filler(pairs[0])]])
    assert first.result is not None
    assert attempt.result is not None
    more = float(attempt.result.loss_sum - first.result.loss_sum)
    return same_gradients(alone, gradients_of(bench.policy)), float(attempt.result.sums[PAIRS]), more


def test_a_filler_counts_nothing_although_its_loss_is_ln_2() -> None:
    assert run_on_ranks(1, fillers, timeout_s=60) == [(True, ALL_PAIRS, 0.0)]


PLACES = 4


def survive(lora: bool, failing: int, first_pass: bool, reshard: bool) -> tuple[int, int, int, int, list[str]]:
    """Collective: places that failed, that were recovered from, that left something else than they should have, and
    steps after which an adapter was off; what the log said first."""
    bench = Bench(lora=lora, reshard=reshard)
    pairs = own_pairs()
    with FaultInjector(bench.stages[failing]).count(rank=1, step=7) as counted:
        bench.step(pairs, step=7)
    bench.policy.zero_grad(set_to_none=True)
    counts = [len(counted.operations)]
    dist.broadcast_object_list(counts, src=1)
    expected = undisturbed(bench, pairs, failing)
    tally = [0, 0, 0, 0]
    for place in range(1, counts[0], -(-counts[0] // PLACES)):
        if first_pass:
            bench.stages.policy.close()
            bench = Bench(lora=lora, reshard=reshard)
        for stage in bench.stages:
            stage.load_state_dict(FRESH)
        with FaultInjector(bench.stages[failing]).fail_at(rank=1, step=7, operation=place) as faults:
            _, kept = bench.step(pairs, step=7)
        found = gradients_of(bench.policy)
        bench.policy.zero_grad(set_to_none=True)
        wrong = not (same_gradients(found, expected[0]) and kept.equal(expected[1]))
        here = torch.tensor([float(faults.fired), float(wrong), float(adapters_off(bench.policy))])
        dist.all_reduce(here)
        tally[0] += here[0].item() > 0
        tally[1] += bench.stages[failing].limit == RowLimit(2)
        tally[2] += here[1].item() > 0
        tally[3] += here[2].item() > 0
    return (*tally, [event.stage for event in bench.events][:1])  # type: ignore[return-value]


FRESH: dict[str, Any] = {
    "unit": "rows",
    "size": None,
    "wait": 200,
    "quiet_steps": 0,
    "before_growth": None,
    "tolerated": [],
    "counters": {"recoveries": 0, "thrashings": 0, "growths": 0},
}


def undisturbed(bench: Bench, pairs: Sequence[Sample], failing: int) -> Any:
    """What a run gives whose stage was cut that small from the beginning."""
    bench.stages[failing].use_limit(RowLimit(2))
    _, kept = bench.step(pairs)
    gradients = gradients_of(bench.policy)
    bench.policy.zero_grad(set_to_none=True)
    bench.stages[failing].use_limit(RowLimit(SETTINGS.batch_size))
    return gradients, kept


def adapters_off(model: nn.Module) -> bool:
    return not model.training or any(getattr(module, "disabled", False) for module in model.modules())


@pytest.mark.parametrize("first_pass", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("failing", [0, 1], ids=["reference", "policy"])
@pytest.mark.parametrize(("lora", "reshard"), [(False, True), (True, True), (True, False)])
def test_either_stage_is_run_again_and_adapters_are_on_afterwards(
    lora: bool, reshard: bool, failing: int, first_pass: bool
) -> None:
    for injected, recovered, wrong, off, stages in run_on_ranks(
        2, survive, lora, failing, first_pass, reshard, timeout_s=100
    ):
        assert (injected, recovered, wrong, off) == (PLACES, PLACES, 0, 0)
        assert stages == [(REFERENCE, POLICY)[failing]]


def messages() -> list[str]:
    bench = Bench(lora=True)
    told: list[Change] = []
    bench.stages.reference.on_change = told.append
    with FaultInjector(bench.stages.reference).fail_at(rank=1, step=3, operation=5):
        bench.step(own_pairs(), step=3)
    return [change.reason for change in told]


def test_the_message_names_the_stage() -> None:
    for told in run_on_ranks(2, messages, timeout_s=60):
        assert len(told) == 1
        assert told[0].startswith("step 3, reference log-probabilities: out of memory on rank 1 ")
