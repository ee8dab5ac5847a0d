"""DPO and PPO recover from out-of-memory errors in any stage, tested at some of its operations."""

import pytest
import torch

from tests.distributed.faults.recipes import KINDS, ON_PAIRS, RECIPE_CASES, RecipeBench, RecipeCase
from tests.distributed.faults.sweeps import Outcome, sweep
from tests.ranks import run_on_ranks
from torchtune_adaptive.rl.stages import GENERATE, TRAIN_POLICY
from torchtune_adaptive.tune.preference import PAIRS, POLICY, REFERENCE
from torchtune_adaptive.tune.samples import PAIR

SAMPLED = 2  # operations per stage
WAYS = {
    **dict.fromkeys(ON_PAIRS, ("first pass", "drain too", "no reshard", "without padding", "full checkpointing")),
    "full_ppo": (f"{GENERATE}, first pass", f"{TRAIN_POLICY}, first pass", "drain too"),
}


def sweep_all(cases: list[RecipeCase]) -> dict[str, Outcome]:
    return {case.name: sweep(case, SAMPLED) for case in cases}


def check(cases: list[RecipeCase]) -> None:
    for outcomes in run_on_ranks(cases[0].world_size, sweep_all, cases, timeout_s=200):
        assert set(outcomes.values()) == {(SAMPLED, SAMPLED, 0, 0)}


@pytest.mark.smoke("full_dpo", "full_ppo")
@pytest.mark.parametrize("kind", KINDS)
def test_oom_in_a_stage_does_not_change_the_step(kind: str):
    ways = (*KINDS[kind], *WAYS.get(kind, ("drain too",)))
    check([case for case in RECIPE_CASES if case.kind == kind and case.name.endswith(ways)])


def test_oom_in_a_stage_with_replicas_does_not_change_the_step():
    check([case for case in RECIPE_CASES if case.name.endswith("hybrid")])


def fill() -> tuple[bool, float, float]:
    """Run a step with and without a filler; return whether gradients are equal, the pairs counted and the difference
    in loss.
    """
    bench = RecipeBench(RecipeCase("", "full_dpo", POLICY, world_size=1))
    stages, model, pairs = bench.stages, bench.recipe.model, [dict(pair) for pair in bench.samples]
    stages[REFERENCE].run(pairs, step=1)
    losses, gradients = [], []
    for microbatches in ([pairs], [pairs, [PAIR.filler(pairs[0])]]):
        result, _ = stages[POLICY].attempt(microbatches)
        losses.append(float(result.loss_sum))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    return all(map(torch.equal, *gradients)), float(result.sums[PAIRS]), losses[1] - losses[0]


def test_filler_does_not_count():
    assert run_on_ranks(1, fill, timeout_s=60) == [(True, 4, 0.0)]
