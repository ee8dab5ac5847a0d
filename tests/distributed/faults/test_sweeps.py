"""A step recovers from an out-of-memory error. `python -m tests.distributed.faults` tries every operation."""

import sys

import pytest

from tests.distributed.faults.meshes import OnMesh
from tests.distributed.faults.scenarios import KINDS, ON_PAIRS, SCENARIOS, RecipeStage, Scenario
from tests.distributed.faults.sweeps import Outcome, sweep
from tests.ranks import run_on_ranks
from torchtune_adaptive.rl.stages import GENERATE, TRAIN_POLICY

PLAIN = ("", "3 ranks, two fail", "fails in the retry too", "fails in the drain too", "first pass", "reduce once")
PLAIN += ("reduce once, fails in the drain too", "error of DTensor", "error of a driver")
SAMPLED = {
    *(", ".join(filter(None, ("plain", way))) for way in PLAIN),
    *("full checkpointing", "selective checkpointing", "lora", "lora, full checkpointing", "no reshard after forward"),
    *("bf16", "without padding", "without padding, fails in the drain too", "with a frozen model", "offloaded"),
    *("one group", "head in chunks, reduce once", "hybrid, head in chunks, fails in the retry too"),
    "bf16, full checkpointing, reduce once",
    *("hybrid", "hybrid, 8 samples, fails in the drain too", "hybrid, one group", "replicated, one microbatch"),
    *("whole", "whole, both ranks fail", "whole, fails in the drain too", "whole, fails in the retry too"),
    *("whole, one bucket, 3 ranks, two fail", "whole, lora, full checkpointing", "replicated"),
    *(case.name for case in SCENARIOS.values() if isinstance(case.model, OnMesh)),
}
"""Scenarios that differ in communication and stored tensors, and a few that differ in failing ranks."""


@pytest.mark.smoke(
    "plain",
    "plain-reduce_once",
    "plain-fails_in_the_drain_too",
    "plain-3_ranks-two_fail",
    "lora-full_checkpointing",
    "without_padding",
    "hybrid",
    "with_a_frozen_model",
    "offloaded",
    "one_group",
    "whole",
    "whole-one_bucket-3_ranks-two_fail",
    "expert_parallel-checkpointing",
)
@pytest.mark.parametrize("name", sorted(SAMPLED), ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def test_step_after_a_recovery_is_bitwise_an_undisturbed_one(name: str) -> None:
    case = SCENARIOS[name]
    most = 3 if case.world_size > 3 else 5
    for outcome in run_on_ranks(case.world_size, sweep, case, most, timeout_s=120):
        assert outcome == (most, most, 0, 0)


@pytest.mark.smoke("hybrid")
@pytest.mark.parametrize("name", ["plain, first pass", "hybrid"])
def test_collective_may_fail_before_and_after_peers_match_it(name: str) -> None:
    case = SCENARIOS[name]
    outcome, *_ = run_on_ranks(case.world_size, sweep, case, sys.maxsize, True, timeout_s=120)
    assert outcome.injected > 40
    assert outcome == (outcome.injected, outcome.injected, 0, 0)


WAYS_OF_PAIRS = ("first pass", "fails in the drain too", "no reshard", "without padding", "full checkpointing")
WAYS_OF_STAGES = {
    **dict.fromkeys(ON_PAIRS, WAYS_OF_PAIRS),
    "full_ppo": (f"{GENERATE}, first pass", f"{TRAIN_POLICY}, first pass", "fails in the drain too"),
}


def sweep_all(cases: list[Scenario]) -> dict[str, Outcome]:
    return {case.name: sweep(case, 2) for case in cases}


@pytest.mark.smoke("full_dpo", "full_ppo")
@pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
def test_out_of_memory_error_in_a_stage_does_not_change_the_step(kind: str) -> None:
    ends = (*KINDS[kind], *WAYS_OF_STAGES[kind]) if kind in KINDS else kind
    cases = [case for case in SCENARIOS.values() if isinstance(case.model, RecipeStage) and case.name.endswith(ends)]
    cases = [case for case in cases if kind in (case.model.kind, "hybrid")]
    for outcomes in run_on_ranks(cases[0].world_size, sweep_all, cases, timeout_s=200):
        assert set(outcomes.values()) == {(2, 2, 0, 0)}
