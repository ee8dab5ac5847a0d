"""torchtune's PPO recipe and ours on the same answers: the same figures and weights."""

from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.recipes.ppo.rollouts import given_to_ours, ppo_config, run_stock_ppo, saved
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import RELATIVE, run_ours

WHOLE = "ppo_batch_size=8"
"""An update uses all answers of an iteration, so that their order does not matter."""
CASES = {
    "plain": (WHOLE,),
    "penalised": (WHOLE, "penalise_no_eos=True", "min_response_length=2", "temperature=0.7", "loss.value_coeff=0.5"),
    "checkpointed": (WHOLE, "enable_activation_checkpointing=True", "gamma=0.9", "kl_coeff=0.2", "stop_token_ids=null"),
}
FIGURES = (
    *("scores", "num_stop_tokens", "response_lengths", "rlhf_reward", "kl", "kl_reward"),
    *("loss", "policy_loss", "value_loss", "clipfrac"),
)


def run_both(folder: Path) -> None:
    for case, overrides in CASES.items():
        stock, ours = folder / case / "stock", folder / case / "ours"
        run_stock_ppo(ppo_config(stock, *overrides, f"value_checkpointer.output_dir={stock / 'value'}"))
        with given_to_ours():
            run_ours("full_ppo", ppo_config(ours, *overrides))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    run_on_ranks(1, run_both, folder, timeout_s=150, in_group=False)
    return folder


@pytest.mark.smoke("plain")
@pytest.mark.parametrize("case", CASES)
def test_every_iteration_has_the_figures_of_the_stock_recipe(runs: Path, case: str) -> None:
    stock, ours = (read_log(runs / case / who / "log.jsonl") for who in ("stock", "ours"))
    assert len(ours) == len(stock) == 3
    assert stock[0].keys() <= ours[0].keys()
    assert_same_figures(ours, stock, FIGURES, rel=RELATIVE, abs=1e-5)
    assert ours[-1]["kl"] != 0


@pytest.mark.smoke("plain")
@pytest.mark.parametrize("case", CASES)
def test_both_models_have_the_weights_of_the_stock_recipe(runs: Path, case: str) -> None:
    ours = saved(runs / case / "ours")
    stock = saved(runs / case / "stock", value="../../value/epoch_0")
    start = torch.load(runs / case / "weights" / "demo_value.pt", weights_only=True)
    torch.testing.assert_close(ours, stock, rtol=RELATIVE, atol=1e-6)
    assert not torch.equal(ours["value.output.weight"], start["output.weight"])
