"""PPO compiled and in bf16, compared with the plain run."""

import os
from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.recipes.ppo.rollouts import ppo_config, saved
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import run_ours

SMALL = (
    "batch_size=2",
    "ppo_batch_size=2",
    "ppo_epochs=1",
    "forward_batch_size=2",
    "num_steps=8",
    "dataset.samples=8",
    "max_generated_tokens=4",
)
WAYS = {"plain": (), "compiled": ("compile=True",), "bf16": ("dtype=bf16",)}
RELATIVE = 1e-5


def train(folder: Path) -> None:
    """Collective: run two iterations with each option."""
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"
    for way, overrides in WAYS.items():
        run_ours("full_ppo", ppo_config(folder / way, *SMALL, *overrides))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    run_on_ranks(2, train, folder, timeout_s=200, in_group=False)
    return folder


def test_compiled_run_equals_the_plain_run(runs: Path) -> None:
    torch.testing.assert_close(saved(runs / "compiled"), saved(runs / "plain"), rtol=RELATIVE, atol=1e-6)
    compiled, plain = (read_log(runs / way / "log.jsonl") for way in ("compiled", "plain"))
    figures = ("scores", "kl", "policy_loss", "value_loss", "response_lengths")
    assert_same_figures(compiled, plain, figures, rel=RELATIVE, abs=1e-6)


def test_bf16_run_trains_both_models_and_stays_close(runs: Path) -> None:
    weights, expected = saved(runs / "bf16"), saved(runs / "plain")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    of_heads = [name for name in weights if name.endswith("output.weight")]
    assert len(of_heads) == 2
    for name in of_heads:
        torch.testing.assert_close(weights[name].float(), expected[name], rtol=0.05, atol=0.02, msg=name)
    first = read_log(runs / "bf16" / "log.jsonl")[0]
    assert first["kl"] == 0.0
    assert first["value_loss"] == pytest.approx(read_log(runs / "plain" / "log.jsonl")[0]["value_loss"], rel=0.3)
