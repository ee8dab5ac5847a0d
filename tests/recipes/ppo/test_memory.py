"""PPO with little memory: a critic larger than the policy, and ranks without memory for a row."""

from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.running import load_ours
from torchtune_adaptive.errors import OneRowDoesNotFitError
from torchtune_adaptive.tune import distributed


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
