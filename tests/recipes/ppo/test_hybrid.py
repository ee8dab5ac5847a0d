"""PPO on a mesh of 2 replicas of 2 ranks each, compared with a flat mesh of the same ranks."""

from pathlib import Path

from tests.fault_injection import FaultInjector
from tests.ranks import run_on_ranks
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.ppo.test_runs import compare
from tests.recipes.recorders import events_of
from tests.recipes.running import load_ours, run_ours
from torchtune_adaptive.rl.stages import STAGES

ON_FOUR = ("batch_size=2", "ppo_batch_size=2", "forward_batch_size=2")
HYBRID = ("data_parallel_replicate_dim=2", "adaptive.regrow_after=0")


def run_all(folder: Path) -> None:
    run_ours("full_ppo", ppo_config(folder / "flat", *ON_FOUR))
    recipe = load_ours("full_ppo")(ppo_config(folder / "hybrid", *ON_FOUR, *HYBRID))
    recipe.setup()
    for number, stage in enumerate(STAGES):
        FaultInjector(recipe.stages.runners[stage]).fail_at(rank=3 * (number % 2), step=1, operation=40).__enter__()
    recipe.train()
    recipe.cleanup()


def test_answers_and_weights_are_those_of_a_flat_mesh_whichever_replica_fails(tmp_path: Path) -> None:
    run_on_ranks(4, run_all, tmp_path, timeout_s=200, in_group=False)
    compare(tmp_path / "hybrid", tmp_path / "flat")
    message = " ".join(event["reason"] for event in events_of(tmp_path / "hybrid", "recovery"))
    assert "on rank 0" in message
    assert "on rank 3" in message
