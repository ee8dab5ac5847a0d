"""PPO on a mesh of 2 replicas of 2 ranks each, beside the same ranks in one dimension."""

from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.ppo.test_runs import compare
from tests.recipes.running import load_ours, run_ours
from torchtune_adaptive.report.journal import read_timeline
from torchtune_adaptive.rl.stages import STAGES
from torchtune_adaptive.testing import FaultInjector

ON_FOUR = ("batch_size=2", "ppo_batch_size=2", "forward_batch_size=2")
HYBRID = "data_parallel_replicate_dim=2"


def run_all(folder: Path) -> None:
    for case, overrides in {"flat": (), "hybrid": (HYBRID,)}.items():
        run_ours("full_ppo", ppo_config(folder / case, *ON_FOUR, *overrides))
    recipe = load_ours("full_ppo")(ppo_config(folder / "failing", *ON_FOUR, HYBRID, "adaptive.regrow_after=0"))
    recipe.setup()
    for number, stage in enumerate(STAGES):
        FaultInjector(recipe.stages.runners[stage]).fail_at(rank=3 * (number % 2), step=1, operation=40).__enter__()
    recipe.train()
    recipe.cleanup()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    run_on_ranks(4, run_all, folder, timeout_s=200, in_group=False)
    return folder


@pytest.mark.parametrize("case", ["hybrid", "failing"])
def test_answers_and_weights_are_those_of_a_mesh_of_one_dimension(runs: Path, case: str) -> None:
    compare(runs / case, runs / "flat")


def test_ranks_of_both_replicas_have_run_out_of_memory(runs: Path) -> None:
    events = read_timeline(runs / "failing" / "out").events
    told = " ".join(event["reason"] for event in events if event["kind"] == "recovery")
    assert "on rank 0" in told
    assert "on rank 3" in told
