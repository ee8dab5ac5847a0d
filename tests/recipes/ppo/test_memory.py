"""PPO with little memory: a critic larger than the policy, and ranks without memory for a row."""

from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.recorders import events_of
from tests.recipes.running import load_ours, run_ours
from torchtune_adaptive.errors import OneRowDoesNotFitError
from torchtune_adaptive.rl.stages import GENERATE, TRAIN_POLICY, TRAIN_VALUE
from torchtune_adaptive.tune import distributed

FORWARD_BATCH_SIZE = 4
LARGE_CRITIC = (
    "reward_and_value_model.num_layers=6",
    "reward_and_value_model.intermediate_dim=1024",
    "batch_size=32",
    "ppo_batch_size=32",
    f"forward_batch_size={FORWARD_BATCH_SIZE}",
    "gradient_accumulation_steps=8",
    "num_steps=64",
    "dataset.samples=64",
    "adaptive.memory_limit=44MiB",
    "adaptive.round_to=none",
)


def train_with_a_large_critic(folder: Path) -> None:
    from torchtune_adaptive.demo.model import demo_classifier
    from torchtune_adaptive.demo.weights import generate_if_missing

    generate_if_missing(
        folder / "weights" / "critic.pt", lambda: demo_classifier(num_layers=6, intermediate_dim=1024).state_dict()
    )
    plain = "torchtune.training.FullModelTorchTuneCheckpointer"
    files = [
        f"{key}.{name}={value}"
        for key in ("value_checkpointer", "reward_checkpointer")
        for name, value in (("_component_", plain), ("checkpoint_files", "[critic.pt]"))
    ]
    run_ours("full_ppo", ppo_config(folder / "run", *LARGE_CRITIC, *files, "use_maximum_batch_size=True"))


def test_critic_larger_than_the_policy_has_its_limit(tmp_path: Path) -> None:
    run_on_ranks(2, train_with_a_large_critic, tmp_path, timeout_s=150, in_group=False)
    rows = {event["stage"]: event["after"] for event in events_of(tmp_path / "run", "search")}
    assert 1 <= rows[TRAIN_VALUE] < rows[TRAIN_POLICY]
    assert rows[GENERATE] > FORWARD_BATCH_SIZE, "which a search has no use for"
    assert events_of(tmp_path / "run", "recovery") == []


def refused_for_want_of_memory(folder: Path, limits: str) -> str:
    """Collective: return the error of a run whose models and optimizer do not fit."""
    adam = ("optimizer._component_=torch.optim.AdamW", "optimizer.lr=0.001")
    searched = (f"adaptive.memory_limit={limits}", "use_maximum_batch_size=True")
    recipe = load_ours("full_ppo")(ppo_config(folder, *adam, *searched, "batch_size=4"))
    with pytest.raises(OneRowDoesNotFitError) as error:
        recipe.setup()
    distributed.leave()
    return str(error.value)


@pytest.mark.parametrize("limits", ["[9MiB,2MiB]", "[9MiB,0.5MiB]"])
def test_if_no_row_fits_every_rank_reports_the_required_memory(tmp_path: Path, limits: str) -> None:
    """This includes ranks without memory for the models."""
    message = run_on_ranks(2, refused_for_want_of_memory, tmp_path / "run", limits, timeout_s=60, in_group=False)
    assert message[0] == message[1]
    assert f"on rank 1, whose budget is {'2.0 MiB' if '2MiB' in limits else '512.0 KiB'}" in message[0]
