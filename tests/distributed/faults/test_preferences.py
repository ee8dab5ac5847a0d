"""Both stages of a preference step: gradients that no split and no number of ranks changes, and recovery in either.

Every operation of either stage: `python -m tests.distributed.faults --case preferences`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.faults.preferences import (
    PREFERENCE_CASES,
    PreferenceCase,
    models_of,
    pairs_of_the_step,
    settings_of,
    stages_of,
)
from tests.distributed.faults.sweeps import Outcome, sweep
from tests.distributed.models import ModelConfig, gradients_of, same_gradients
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.governor import Change
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit
from torchtune_adaptive.engine.reports import StepResult
from torchtune_adaptive.testing import FaultInjector
from torchtune_adaptive.tune.preference import PAIRS, POLICY, REFERENCE
from torchtune_adaptive.tune.samples import PAIR, Sample

ALL_PAIRS = 12
SAMPLED = 3  # operations of the stage that fails
WAYS = ("later pass", "first pass", "drain too", "no reshard", "no reshard from the first pass on", "without padding")


def own_pairs() -> list[Sample]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return pairs_of_the_step(ALL_PAIRS)[rank::ranks]


class Both:
    """Both stages over a small model, on all ranks there are."""

    def __init__(self, *, lora: bool, joined: bool = False) -> None:
        config = ModelConfig(dropout=0.0, lora=lora, sharded=dist.get_world_size() > 1, joined=joined)
        self.policy, self.reference = models = models_of(config)
        self.changes: list[Change] = []
        settings = settings_of(config, rows=3, samples=6)
        self.stages = stages_of(models, settings, self.changes.append)

    def step(self, pairs: Sequence[Sample], step: int = 1) -> StepResult:
        """Collective: both stages."""
        pairs = [dict(pair) for pair in pairs]
        return self.stages.run(pairs, step=step)[POLICY]


def whole(model: nn.Module) -> dict[str, Any]:
    """Collective: the gradients of the mean over pairs, of all ranks; no tensors, which live as long as their rank."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {name: (gradient * dist.get_world_size() / ALL_PAIRS).numpy() for name, gradient in full.items()}


def outcome(lora: bool, limit: Limit, joined: bool = False) -> tuple[dict[str, Any], dict[str, float]]:
    both = Both(lora=lora, joined=joined)
    both.stages.use_limits(dict.fromkeys(both.stages, limit))
    result = both.step(own_pairs())
    sums = {name: float(value) for name, value in result.sums.items()}
    return whole(both.policy), {**sums, "loss": float(result.loss_sum), "labels": float(result.target_tokens)}


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
    both = Both(lora=False)
    pairs = [dict(pair) for pair in own_pairs()]
    both.stages[REFERENCE].run(pairs, step=1)
    first, _ = both.stages[POLICY].attempt([pairs])
    alone = gradients_of(both.policy)
    both.policy.zero_grad(set_to_none=True)
    result, _ = both.stages[POLICY].attempt([pairs, [PAIR.filler(pairs[0])]])
    assert first is not None
    assert result is not None
    more = float(result.loss_sum - first.loss_sum)
    return same_gradients(alone, gradients_of(both.policy)), float(result.sums[PAIRS]), more


def test_a_filler_counts_nothing_although_its_loss_is_ln_2() -> None:
    assert run_on_ranks(1, fillers, timeout_s=60) == [(True, ALL_PAIRS, 0.0)]


def sweep_all(cases: list[PreferenceCase]) -> dict[str, Outcome]:
    return {case.name: sweep(case, SAMPLED) for case in cases}


@pytest.mark.parametrize("way", WAYS)
def test_either_stage_of_either_recipe_is_run_again_and_leaves_what_plain_fsdp_leaves(way: str) -> None:
    cases = [case for case in PREFERENCE_CASES if case.name.endswith(f", {way}")]
    assert len(cases) == 4
    for outcomes in run_on_ranks(2, sweep_all, cases, timeout_s=150):
        assert set(outcomes.values()) == {(SAMPLED, SAMPLED, 0, 0)}


def messages(failing: str) -> list[tuple[str, str]]:
    both = Both(lora=True)
    with FaultInjector(both.stages[failing]).fail_at(rank=1, step=3, operation=5):
        both.step(own_pairs(), step=3)
    return [(event.stage, event.reason) for event in both.changes]


@pytest.mark.parametrize("name", [REFERENCE, POLICY], ids=["reference", "policy"])
def test_message_and_record_name_the_stage(name: str) -> None:
    for [(stage, reason)] in run_on_ranks(2, messages, name, timeout_s=60):
        assert stage == name
        assert reason.startswith(f"step 3, {name}: out of memory on rank 1 ")
