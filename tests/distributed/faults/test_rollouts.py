"""PPO and GRPO survive running out of memory in any stage. Every operation: `python -m tests.distributed.faults`."""

import pytest

from tests.distributed.faults.rollouts import KINDS, ROLLOUT_CASES, RolloutCase
from tests.distributed.faults.sweeps import Outcome, sweep
from tests.ranks import run_on_ranks

SAMPLED = 2  # operations of each stage


def sweep_all(cases: list[RolloutCase]) -> dict[str, Outcome]:
    return {case.name: sweep(case, SAMPLED) for case in cases}


@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_that_runs_out_of_memory_in_a_stage_comes_to_what_none_has_disturbed(kind: str):
    ways = ("layer by layer", "first pass", "drain too") if kind == "full_ppo" else ("drain too",)
    cases = [each for each in ROLLOUT_CASES if each.kind == kind and each.name.endswith((*KINDS[kind], *ways))]
    for outcomes in run_on_ranks(2, sweep_all, cases, timeout_s=200):
        assert set(outcomes.values()) == {(SAMPLED, SAMPLED, 0, 0)}
