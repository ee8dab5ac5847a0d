"""The stages of PPO survive running out of memory. Every operation: `python -m tests.distributed.faults`."""

import pytest

from tests.distributed.faults.rollouts import ROLLOUT_CASES, RolloutCase
from tests.distributed.faults.sweeps import Outcome, sweep
from tests.ranks import run_on_ranks

SAMPLED = 2  # operations of each stage
WAYS = ("first pass", "whole iteration", "drain too", "layer by layer")


def sweep_all(cases: list[RolloutCase]) -> dict[str, Outcome]:
    return {case.name: sweep(case, SAMPLED) for case in cases}


@pytest.mark.parametrize("way", WAYS)
def test_a_stage_of_ppo_that_runs_out_of_memory_is_run_again_and_finds_what_plain_fsdp_finds(way: str):
    cases = [case for case in ROLLOUT_CASES if case.name.endswith(way)]
    for outcomes in run_on_ranks(2, sweep_all, cases, timeout_s=150):
        assert set(outcomes.values()) == {(SAMPLED, SAMPLED, 0, 0)}
